"""Keep other libraries' notices off standard error."""

from __future__ import annotations

import os
import sys
import warnings

from .report import debugging


def silence_third_parties() -> None:
    """Quiet transformers and the hub; call it before they are imported.

    What the user has set in the environment stays. A download keeps its
    progress bar on a terminal: a model can take minutes.
    """
    if debugging():
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
