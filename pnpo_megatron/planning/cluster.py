"""GPUs of one kind: what a small TOML file says about them."""

import re
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pnpo_megatron.errors import ConfigError

FOLDER = Path(__file__).parent / "clusters"


@dataclass(frozen=True)
class Cluster:
    """A number of equal GPUs. Figures of one GPU, decimal units, as data sheets give them."""

    name: str
    gpus: int
    tflops: float
    """Dense bfloat16, 1e12 a second."""
    memory_gb: float
    memory_tb_s: float
    nvlink_gb_s: float
    """Both directions together."""
    network_gb_s: float
    """One direction, between nodes."""
    gpus_a_node: int

    @property
    def memory(self) -> float:
        """Bytes of one GPU."""
        return self.memory_gb * 1e9

    def link(self, ranks: int) -> float:
        """Bytes a second that one GPU sends to neighbours among `ranks` consecutive GPUs."""
        return (self.nvlink_gb_s / 2 if ranks <= self.gpus_a_node else self.network_gb_s) * 1e9


def known_clusters() -> list[str]:
    """GPU names that are shipped."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_cluster(name: str) -> Cluster:
    """``h20x32`` (32 of a shipped GPU), or the path of a TOML file with the same keys and ``gpus``.

    Raises:
        ConfigError: neither, or a file with missing, unknown or impossible values.
    """
    shipped = re.fullmatch(r"(\w+?)x(\d+)", name)
    path = FOLDER / f"{shipped[1]}.toml" if shipped else Path(name)
    if not path.is_file():
        raise ConfigError(
            f"--cluster {name}: give GPU and count, e.g. h20x32 (GPUs: {', '.join(known_clusters())}), "
            "or the path of a TOML file"
        )
    try:
        values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    if shipped:
        values["gpus"] = int(shipped[2])
    wanted = {field.name for field in fields(Cluster)} - {"name"}
    if values.keys() != wanted:
        raise ConfigError(f"{path}: expected the keys {', '.join(sorted(wanted))}; found {', '.join(values)}")
    wrong = [key for key, value in values.items() if isinstance(value, bool | str) or not value > 0]
    if wrong:
        raise ConfigError(f"{path}: {wrong[0]} = {values[wrong[0]]!r}: expected a positive number")
    return Cluster(name, **values)
