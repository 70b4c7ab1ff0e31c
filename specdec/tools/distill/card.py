"""The model card of a draft, as text. No mlx here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...utils.tables import markdown_table

_FORMS = {"dspark": "DSpark", "dflash": "DFlash", "dflash2": "DFlash 2"}


def readme(card: dict[str, Any]) -> str:
    """``README.md`` of a draft's folder, from its ``distill.json``."""
    target, training, data = card["target"], card["training"], card["data"]
    layers = ", ".join(map(str, card["layers"]))
    shared = card["embedding"] != "own"
    wide = f", each with the MLPs of {card['widen']}" if card["widen"] > 1 else ""
    kind = ""
    if card.get("kind") == "block":
        form = _FORMS[card["form"]]
        kind = f"A {form} head, which drafts a block of {card['block_size']}: "
    origin = "layers that began at random"
    if layers:
        origin = (
            f"{len(card['layers'])} layers, made from layers {layers} of the target"
        )
    lines = [
        "---",
        "library_name: mlx",
        "tags: [speculative-decoding, draft]",
        "---",
        "",
        f"# A draft for {target['name']}",
        "",
        f"{kind}{origin}{wide}, and trained on the divergence to its distribution, "
        "under its own embedding and head. It proposes tokens; the target decides, so "
        "that it changes no output.",
        "",
        "```sh",
        "specdec run --target TARGET --draft THIS_FOLDER --prompts FILE",
        "```",
        "",
        "| | |",
        "|---|---|",
        f"| target | {target['name']} |",
        f"| its fingerprint | `{target['fingerprint']}` |",
        f"| parameters learnt | {card['parameters'] / 1e6:.1f} M |",
        f"| stored | {_stored(card['bits'], card['dtype'], shared=shared)} |",
        f"| data | {data['documents']} texts, {data['tokens'] / 1e6:.1f} M tokens "
        f"({data['written_by_target'] / 1e6:.1f} M of them the target's own prompts "
        "and answers) |",
        f"| training | {training['steps']} steps, {training['tokens'] / 1e6:.1f} M "
        f"tokens, {training['seconds']:.0f} s |",
        *_begun(card.get("began_with")),
        f"| made with | `{card['command']}` |",
        f"| on | {card['machine']['device']} ({card['machine']['backend']}), "
        f"mlx {card['machine']['mlx']}, specdec {card['machine']['specdec']} |",
        "",
    ]
    sections = (
        (
            "How often it chooses as the target does, greedily, on held-out texts of "
            "the target:",
            _agreement(card["agreement"]),
        ),
        ("The same, while it learnt:", _learning(card["training"]["history"])),
        ("Rounds of the engine:", _rounds(card["rounds"])),
    )
    for title, table in sections:
        if table:
            lines += [title, "", table]
    return "\n".join(lines)


def _agreement(sets: Mapping[str, Any]) -> str:
    """Agreement and divergence by set of prompts; empty without any."""
    rows = [
        [name, f"{x['positions']:.0f}", f"{x['agreement']:.3f}", f"{x['kl']:.3f}"]
        for name, x in sorted(sets.items(), key=lambda item: _own_first(item[0]))
    ]
    return _table(["prompts", "positions", "agreement", "KL (nats)"], rows)


def _learning(history: Sequence[Mapping[str, Any]]) -> str:
    """Agreement by tokens of training; empty where it was not measured."""
    names = {name for moment in history for name in moment["held_out"]}
    columns = sorted(names, key=_own_first)
    rows = [
        [
            f"{moment['tokens'] / 1e6:.1f}",
            *(f"{moment['held_out'][name]['agreement']:.3f}" for name in columns),
        ]
        for moment in history
        if moment["held_out"].keys() == names
    ]
    return _table(["M tokens of training", *columns], rows if names else [])


def _rounds(rounds: Sequence[Mapping[str, Any]]) -> str:
    """Acceptance by set of prompts, temperature and draft length."""
    rows = [
        [
            f"{entry['set']} ({entry['prompts']})",
            f"{entry['temperature']:g}",
            entry["num_draft_tokens"],
            f"{entry['acceptance_rate']:.3f}",
            f"{entry['acceptance_length']:.2f}",
        ]
        for entry in rounds
    ]
    header = ["prompts", "temperature", "k", "accepted", "tokens a round"]
    return _table(header, rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    return markdown_table(header, rows) if rows else ""


def _own_first(name: str) -> tuple[bool, str]:
    return name != "own", name


def _begun(earlier: dict[str, Any] | None) -> list[str]:
    """A line for each draft that the training before this one made, newest first."""
    if earlier is None:
        return []
    texts = earlier.get("data", {}).get("tokens", 0) / 1e6
    line = (
        f"| began with | {earlier['name']}, trained on {earlier['tokens'] / 1e6:.1f} M "
        f"tokens in {earlier['seconds']:.0f} s, of {texts:.1f} M tokens of texts, "
        f"with `{earlier.get('command', 'an unknown command')}` |"
    )
    return [line, *_begun(earlier.get("began_with"))]


def _stored(bits: int | None, dtype: str, *, shared: bool) -> str:
    matrices = dtype if bits is None else f"layers in {bits} bits"
    target = "; embedding, head and tokenizer come from the target"
    return matrices + target * shared
