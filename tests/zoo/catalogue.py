"""Every architecture that mlx-lm ships, each as a tiny configuration or with the reason why it cannot run here."""

from collections.abc import Mapping
from types import MappingProxyType

from tests.zoo.dense import DENSE
from tests.zoo.experts import EXPERTS_ONLY
from tests.zoo.latent import LATENT_ATTENTION
from tests.zoo.recurrent import RECURRENT
from tests.zoo.sizes import Config, Unavailable
from tests.zoo.windows import WINDOWS
from tests.zoo.wrapped import WRAPPED

ZOO: Mapping[str, Config | Unavailable] = MappingProxyType(
    dict(sorted({**DENSE, **EXPERTS_ONLY, **LATENT_ATTENTION, **WINDOWS, **RECURRENT, **WRAPPED}.items()))
)
"""By the name of the module in `mlx_lm.models`."""
