"""The process that moves bytes: model runner, host/device transfer, store client; torch lives here only."""
