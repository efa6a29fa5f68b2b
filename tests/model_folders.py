"""Changes of a model's folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor


def edited(folder: Path, file: str = "config.json", **changes: Any) -> None:
    """Change entries of a JSON file."""
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**content, **changes}))


def with_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors in place."""
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
