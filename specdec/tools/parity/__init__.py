"""A certificate of exactness: this engine compared with mlx-lm's plain decoding."""

from .certify import Certificate, certify
from .compare import Divergence, Evidence, Scores, why_no_tie
from .distribution import DistributionCertificate
from .report import summary
from .tokens import TokenCertificate

__all__ = [
    "Certificate",
    "DistributionCertificate",
    "Divergence",
    "Evidence",
    "Scores",
    "TokenCertificate",
    "certify",
    "summary",
    "why_no_tie",
]
