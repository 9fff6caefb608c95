"""Shared fixtures; what a test starts, its fixture ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # before torch is loaded: see xllm_hier/launch.py
