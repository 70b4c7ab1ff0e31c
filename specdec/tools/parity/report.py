"""A certificate as text."""

from __future__ import annotations

from ...utils.printable import counted
from ...utils.tables import text_table
from .certify import Certificate
from .compare import Divergence, Token
from .distribution import FALSE_ALARM, DistributionCertificate
from .tokens import TokenCertificate

# Number of prefixes of a distribution that are shown, the worst first.
SHOWN_PREFIXES = 10


def summary(certificate: Certificate) -> str:
    """A table, if there is something to show, then the verdict in one line."""
    if isinstance(certificate, TokenCertificate):
        return _tokens(certificate)
    return _distribution(certificate)


def _tokens(certificate: TokenCertificate) -> str:
    lines = []
    if certificate.divergences:
        header = ["prompt", "token", "plain", "engine", "gap at 1 x 1", "at verify"]
        header += ["noise", "of gap", "class"]
        lines += [text_table([header, *map(_row, certificate.divergences)]), ""]
    for divergence in certificate.divergences:
        if divergence.reason:
            where = f"prompt {divergence.prompt}, token {divergence.position}"
            lines.append(f"failure at {where}: {divergence.reason}")
    lines += [f"error of prompt {i}: {error}" for i, error in certificate.errors]
    lines.append(f"verdict: {_token_verdict(certificate)}")
    return "\n".join(lines)


def _row(d: Divergence) -> list[str]:
    cells = [str(d.prompt), str(d.position), _token(d.plain), _token(d.engine)]
    e = d.evidence
    if e is None:
        return [*cells, "", "", "", "", d.kind]
    return [
        *cells,
        f"{e.step.gap:.3g} (top-2 {e.step.top2_gap:.3g})",
        f"{e.verify.gap:.3g} (top-2 {e.verify.top2_gap:.3g}), "
        f"{e.verify.batch_size} x {e.verify.width}",
        f"{e.noise:.3g}",
        f"{e.gap_noise:.3g}",
        d.kind,
    ]


def _token(token: Token | None) -> str:
    return "(end)" if token is None else f"{token.text!r} ({token.id})"


def _token_verdict(certificate: TokenCertificate) -> str:
    prompts = counted(certificate.prompts, "prompt")
    share = f"{certificate.compared} of {certificate.tokens} tokens of {prompts}"
    difference = f"log-probabilities within {certificate.logprob_difference:.2g}"
    if certificate.verdict == "exact":
        return f"exact: {share} equal plain decoding; {difference}"
    ties = counted(certificate.ties, "tie")
    if certificate.verdict == "ties":
        return f"exact up to {ties}: {share} compared; {difference}"
    if certificate.verdict == "incomplete":
        return (
            f"INCOMPLETE: {ties} used up the restarts, {share} compared: "
            "allow more restarts"
        )
    failures = counted(certificate.failures, "failure")
    return f"FAILURE: {failures}, {ties}; {share} compared"


def _distribution(certificate: DistributionCertificate) -> str:
    worst = sorted(certificate.prefixes, key=lambda t: t.fit.p_value)[:SHOWN_PREFIXES]
    header = ["prompt", "after", "draws", "chi-square", "df"]
    header += ["rare", "expected", "p"]
    rows = [
        [
            str(t.prompt),
            f"{len(t.tokens)} tokens",
            str(t.fit.draws),
            f"{t.fit.statistic:.1f}",
            str(t.fit.df),
            str(t.fit.rare),
            f"{t.fit.rare_expected:.2f}",
            f"{t.fit.p_value:.2g}",
        ]
        for t in worst
    ]
    lines = [text_table([header, *rows]), ""] if rows else []
    lines += [f"error of prompt {i}: {error}" for i, error in certificate.errors]
    p_values = ", ".join(f"{name} {p:.2g}" for name, p in certificate.p_values.items())
    tested = (
        f"{certificate.draws} draws of {counted(certificate.prompts, 'prompt')}, "
        f"{len(certificate.prefixes)} prefixes, chi-square {certificate.statistic:.1f} "
        f"on {certificate.df}; p: {p_values}"
    )
    verdicts = {
        "consistent": "consistent with the target's distribution",
        "incomplete": "INCOMPLETE: nothing drafted came often enough: draw more",
        "failure": "FAILURE: not the target's distribution",
    }
    if certificate.errors:
        verdicts["failure"] = "FAILURE: rows ended with an error"
    lines.append(
        f"verdict: {verdicts[certificate.verdict]} (false alarm {FALSE_ALARM:.0e}): "
        f"{tested}"
    )
    return "\n".join(lines)
