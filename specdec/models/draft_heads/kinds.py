"""The kinds of draft heads, and how each is recognized."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from ...errors import ModelError, UnsupportedModelError
from ...utils.data_files import DataError
from ...utils.printable import quoted
from .assistant import AssistantConfig, AssistantHead, assistant_config
from .block import BlockConfig, BlockHead, block_config
from .config import HeadConfig, Published
from .dflash2 import DFlash2Config, DFlash2Head, dflash2_config
from .eagle import EagleConfig, EagleHead, eagle_config
from .gemma import GemmaBlockConfig, GemmaBlockHead, gemma_block_config
from .head import DraftHead
from .muse import muse_config
from .peagle import PEagleConfig, PEagleHead, peagle_config
from .qwen35 import Qwen35BlockConfig, Qwen35BlockHead, qwen35_block_config

#: What reads the configuration of a kind, by ``speculators_model_type``, the first of
#: ``architectures``, or ``model_type``. It raises an UnsupportedModelError where a part
#: is not supported, and a DataError where a value is missing or invalid.
KINDS: dict[str, Callable[[Published], HeadConfig]] = {
    "DFlashDraftModel": block_config,
    "dflash": block_config,
    "DFlash2DraftModel": dflash2_config,
    "dflash2": dflash2_config,
    "Qwen3DSparkModel": block_config,
    "DSparkDraftModel": block_config,
    "Lfm2DSparkDraftModel": block_config,
    "dspark": block_config,
    "Gemma4DSparkModel": gemma_block_config,
    "Qwen35DSparkModel": qwen35_block_config,
    "gemma4_assistant": assistant_config,
    "gemma4_unified_assistant": assistant_config,
    "MuseGlimmerAssistantModel": muse_config,
    "muse_glimmer_assistant": muse_config,
    "LlamaForCausalLMEagle3": eagle_config,
    "Eagle3LlamaForCausalLM": eagle_config,
    "Eagle3Speculator": eagle_config,
    "Qwen3Eagle3Model": eagle_config,
    "eagle3": eagle_config,
    "PEagleDraftModel": peagle_config,
    "PEagleSpeculator": peagle_config,
    "peagle": peagle_config,
}
#: The heads, by their configurations.
HEADS: dict[type[HeadConfig], Callable[[Any], DraftHead]] = {
    AssistantConfig: AssistantHead,
    BlockConfig: BlockHead,
    DFlash2Config: DFlash2Head,
    EagleConfig: EagleHead,
    GemmaBlockConfig: GemmaBlockHead,
    PEagleConfig: PEagleHead,
    Qwen35BlockConfig: Qwen35BlockHead,
}
# Words in the names of kinds that are not supported, and why not.
_UNKNOWN = "what it computes could not be compared with a reference"
_TREES = "it proposes trees of tokens, and rounds here verify one sequence a row"
_REFUSED = {
    "domino": "a recurrent network reads each token of its block before the next",
    "xpress": "a second network rewrites its block until nothing changes",
    "jetspec": _TREES,
    "medusa": _TREES,
    "hydra": _TREES,
    "dfly": _UNKNOWN,
    "lilicorr": _UNKNOWN,
    "dflare": _UNKNOWN,
    "gemma4eagle3": "no layers like Gemma 4's are supported in heads of its kind",
    "v4dspark": "mlx-lm runs none of the targets that it is part of",
    "eagle": "of EAGLE's versions, 3 and 3.1 are supported",
}
# Words in the names of all kinds of heads.
_WORDS = ("dflash", "dspark", "assistant", *_REFUSED)


def kind_of(config: Mapping[str, Any]) -> str:
    """The name of a head's kind; of a model's configuration, its architecture."""
    named = config.get("speculators_model_type")
    if named is None:
        listed = config.get("architectures")
        named = listed[0] if isinstance(listed, list) and listed else ""
        model_type = config.get("model_type")
        if str(named) not in KINDS and (not named or str(model_type) in KINDS):
            named = model_type
    return str(named)


def is_head(config: Mapping[str, Any]) -> bool:
    """Whether a configuration describes a draft head, not a whole model.

    Heads of kinds that are not supported count: :func:`head_config` refuses them.
    """
    kind = kind_of(config)
    return (
        is_mtp(config) or kind in KINDS or any(word in kind.lower() for word in _WORDS)
    )


def is_mtp(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is that of an MTP head in a folder of its own."""
    names = (str(config.get("model_type")), kind_of(config))
    return any("mtp" in name.lower() for name in names)


def head_config(
    config: Mapping[str, Any], names: Collection[str], source: str
) -> HeadConfig:
    """Parse a draft head's configuration.

    Args:
        config: as in ``config.json``.
        names: the arrays stored with it, or their names, as
            :func:`.loading.canonical` returns them.
        source: for messages.

    Raises:
        UnsupportedModelError: the head is of a kind that is not supported.
        ModelError: a value is missing or invalid.
    """
    kind = kind_of(config)
    if kind not in KINDS:
        plain = kind.lower().replace("_", "")
        why = next((_REFUSED[word] for word in _REFUSED if word in plain), None)
        raise UnsupportedModelError(
            f"{source} is a draft head of kind {quoted(kind)}, which is not supported"
            f"{'' if why is None else f': {why}'}; take another draft"
        )
    parse = KINDS[kind]
    if parse is eagle_config and "mask_hidden" in names:  # some are named EAGLE-3
        parse = peagle_config
    try:
        return parse(Published(config, names, source))
    except DataError as error:
        raise ModelError(
            f"{source}: its configuration cannot be read ({error}): download it again"
        ) from error
