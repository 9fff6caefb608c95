"""Reading a checkpoint: safetensors, one file or many, mapped and read tensor by tensor with a progress bar."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from ..errors import ConfigError


class Checkpoint:
    """The tensors of a model folder by name; nothing is read before it is asked for.

    Raises:
        ConfigError: the folder has no readable safetensors, or its index names a file that is not there.
    """

    def __init__(self, folder: str | Path, *, progress: bool = False) -> None:
        self.folder = Path(folder)
        files = weight_files(self.folder)
        self._open: dict[str, Any] = {}
        self._paths: dict[str, Path] = {}
        try:
            for path in files:
                reader: Any = safe_open(path, framework="pt", device="cpu")
                self._open.update(dict.fromkeys(reader.keys(), reader))
                self._paths.update(dict.fromkeys(reader.keys(), path))
        except (OSError, SafetensorError) as error:
            raise ConfigError("model", str(self.folder), f"readable safetensors ({path.name}: {error})") from None
        size = sum(path.stat().st_size for path in files)
        # `delay`: a bar that would be gone within a second is noise.
        self._bar = tqdm(
            total=size, desc="weights", unit="B", unit_scale=True, delay=1.0, disable=not progress, leave=False
        )

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        self._open.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._open

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        rows: slice | None = None,
        columns: slice | None = None,
    ) -> torch.Tensor:
        """The tensor in `dtype`, still backed by the mapped file where the file has that dtype.

        `shape` is that of the whole tensor; `rows` and `columns` choose a part of its first two dimensions.

        Raises:
            ConfigError: it is missing, or has another shape than the configuration says.
        """
        if name not in self._open:
            raise ConfigError("model", str(self.folder), f"a checkpoint with a tensor {name!r} of shape {list(shape)}")
        tensor: torch.Tensor = self._open[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ConfigError(
                "model",
                str(self.folder),
                f"a checkpoint whose tensor {name!r} has shape {list(shape)} (it has {list(tensor.shape)})",
            )
        tensor = tensor[rows] if rows is not None else tensor
        tensor = tensor[:, columns] if columns is not None else tensor
        self._bar.update(tensor.nbytes)
        return tensor.to(dtype)

    def mapped(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, rows: slice | None = None
    ) -> torch.Tensor:
        """As `tensor`, over a mapping of its own: no page of it is in memory before it is touched.

        Raises:
            ConfigError: as `tensor`.
        """
        if name in self._paths:
            self._open[name] = safe_open(self._paths[name], framework="pt", device="cpu")
        return self.tensor(name, shape, dtype, rows=rows)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, each once. Raises ConfigError when there is none, or not all of them."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ConfigError("model", str(folder), "a folder with *.safetensors (this one has none)")
        return files
    names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    for name in names:
        if not (folder / name).is_file():
            raise ConfigError("model", str(folder), f"a complete checkpoint ({index.name} names {name})")
    return [folder / name for name in names]
