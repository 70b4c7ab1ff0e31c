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


def _tokens(found: TokenCertificate) -> str:
    lines = []
    if found.divergences:
        header = ["prompt", "token", "plain", "engine", "gap at 1 x 1", "at verify"]
        header += ["noise", "of gap", "class"]
        lines += [text_table([header, *map(_row, found.divergences)]), ""]
    for divergence in found.divergences:
        if divergence.reason:
            where = f"prompt {divergence.prompt}, token {divergence.position}"
            lines.append(f"failure at {where}: {divergence.reason}")
    lines += [f"error of prompt {i}: {error}" for i, error in found.errors]
    lines.append(f"verdict: {_token_verdict(found)}")
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


def _token_verdict(found: TokenCertificate) -> str:
    prompts = counted(found.prompts, "prompt")
    share = f"{found.compared} of {found.tokens} tokens of {prompts}"
    difference = f"log-probabilities within {found.logprob_difference:.2g}"
    if found.verdict == "exact":
        return f"exact: {share} equal plain decoding; {difference}"
    ties = counted(found.ties, "tie")
    if found.verdict == "ties":
        return f"exact up to {ties}: {share} compared; {difference}"
    if found.verdict == "incomplete":
        return (
            f"INCOMPLETE: {ties} used up the restarts, {share} compared: "
            "allow more restarts"
        )
    failures = counted(found.failures, "failure")
    return f"FAILURE: {failures}, {ties}; {share} compared"


def _distribution(found: DistributionCertificate) -> str:
    worst = sorted(found.prefixes, key=lambda t: t.fit.p_value)[:SHOWN_PREFIXES]
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
    lines += [f"error of prompt {i}: {error}" for i, error in found.errors]
    p_values = ", ".join(f"{name} {p:.2g}" for name, p in found.p_values.items())
    tested = (
        f"{found.draws} draws of {counted(found.prompts, 'prompt')}, "
        f"{len(found.prefixes)} prefixes, chi-square {found.statistic:.1f} "
        f"on {found.df}; p: {p_values}"
    )
    verdicts = {
        "consistent": "consistent with the target's distribution",
        "incomplete": "INCOMPLETE: nothing drafted came often enough: draw more",
        "failure": "FAILURE: not the target's distribution",
    }
    if found.errors:
        verdicts["failure"] = "FAILURE: rows ended with an error"
    lines.append(
        f"verdict: {verdicts[found.verdict]} (false alarm {FALSE_ALARM:.0e}): {tested}"
    )
    return "\n".join(lines)
