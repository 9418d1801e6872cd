"""Settings: one TOML file plus ``--section.key=value``, checked whole before anything is built.

Defaults are the paper's four-epoch run where it states one. Paths are relative to the working folder.
"""

from pnpo_megatron.config.load import load_config
from pnpo_megatron.config.whole import Config

__all__ = ["Config", "load_config"]
