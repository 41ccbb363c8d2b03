"""Pictures of documents that share a prefix."""

from typing import NamedTuple

from canvas import COLORS, FAINT, HEIGHT, INK, draw_box, figure_of, title
from draw_training import draw_attention, note
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

CHAT = [("user", 20), ("reply", 27), ("user", 24), ("call", 34), ("tool", 44), ("reply", 25), ("user", 5), ("", 4)]
"""Messages and their tokens, of a conversation of the Schema-Guided Dialogue dataset about playing a movie."""
THINKING = {1: 44, 3: 60, 5: 52, 7: 36}
"""Tokens of the thinking in each assistant turn. The dataset has none, so this is made up."""
NOT_OWN, EARLIER, THOUGHT, TURN = "#dfe4ec", COLORS[0], COLORS[1], COLORS[2]
PROMPT, ANSWERS = 8, [4, 3, 5]
"""Tokens of a prompt and of three answers to it."""
SHORT = 20
"""Tokens of the shortest box with a word in it."""


class Piece(NamedTuple):
    """A part of a document: a message, or its thinking."""

    message: int
    words: str
    tokens: int


def documents() -> list[list[Piece]]:
    """One document for each assistant turn, as Qwen3's template does: with the thinking since the last question."""
    found = []
    for turn in THINKING:
        asked = max(number for number in range(turn) if CHAT[number][0] == "user")
        pieces = []
        for number, (words, tokens) in enumerate(CHAT[: turn + 1]):
            if asked < number in THINKING:
                pieces.append(Piece(number, "thinking", THINKING[number]))
            pieces.append(Piece(number, words, tokens))
        found.append(pieces)
    return found


def draw_pieces(axes: Axes, pieces: list[Piece], x: float, y: float, trained: set[int]) -> None:
    """Draw pieces one after the other; trained: messages that are trained on."""
    for message, words, tokens in pieces:
        color = EARLIER if message in THINKING else NOT_OWN
        if message in trained:
            color = THOUGHT if words == "thinking" else TURN
        draw_box(axes, x, y, tokens, color, words if tokens >= SHORT else "")
        x += tokens


def num_tokens(pieces: list[Piece]) -> int:
    return sum(piece.tokens for piece in pieces)


def chat_tree() -> Figure:
    figure, axes = figure_of(2, (13, 3.3))
    paths = documents()
    for number, (turn, path) in enumerate(zip(THINKING, paths, strict=True)):
        draw_pieces(axes[0], path, 0, -number, {turn})
    # from the last document, which has no thinking of earlier turns, the others branch off
    trunk = paths[-1]
    branches: dict[int, tuple[list[Piece], set[int]]] = {}
    for turn, path in zip(THINKING, paths, strict=True):
        shared = next((at for at, (one, other) in enumerate(zip(path, trunk, strict=False)) if one != other), len(path))
        begin = num_tokens(trunk[:shared])
        _, turns = branches.get(begin, ([], set()))
        branches[begin] = path[shared:], turns | {turn}
    _, last = branches.pop(num_tokens(trunk))
    draw_pieces(axes[1], trunk, 0, 0, last)
    # the one that begins last comes first, so that no line crosses a box
    for lane, begin in enumerate(sorted(branches, reverse=True), start=1):
        pieces, turns = branches[begin]
        axes[1].plot([begin, begin], [HEIGHT, -lane], color=INK, linewidth=1.6, zorder=3, clip_on=False)
        draw_pieces(axes[1], pieces, begin, -lane, turns)
    unique = num_tokens(trunk) + sum(num_tokens(pieces) for pieces, _ in branches.values())
    title(axes[0], f"A document for each of the four assistant turns: {sum(map(num_tokens, paths))} tokens")
    title(axes[1], f"Each shared prefix once: {unique} tokens")
    for each in axes:
        each.set(xlim=(-1, max(map(num_tokens, paths)) + 1), ylim=(-3.05, 0.95))
    kinds = {"question or tool result": NOT_OWN, "earlier turn": EARLIER, "thinking, trained on": THOUGHT}
    handles = [Patch(color=color, label=label) for label, color in (kinds | {"turn, trained on": TURN}).items()]
    axes[1].legend(handles=handles, loc="lower left", ncols=2, frameon=False, labelcolor=FAINT, fontsize=10.5)
    return figure


def shared_prefixes() -> Figure:
    """Three answers to one prompt, as documents of a packed row and as a tree, and what attention sees."""
    figure, axes = figure_of(3, (13, 3.9), width_ratios=[2.1, 1, 1])
    lanes, packed, tree = axes
    x = 0
    for number, answer in enumerate(ANSWERS):
        draw_box(lanes, x, 0, PROMPT, NOT_OWN, "prompt")
        draw_box(lanes, x + PROMPT, 0, answer, COLORS[number], "ABC"[number])
        x += PROMPT + answer
    note(lanes, 0, 1.2, f"Packed: {x} tokens", color=INK)
    draw_box(lanes, 0, -2, PROMPT, NOT_OWN, "prompt")
    for number, answer in enumerate(ANSWERS):
        draw_box(lanes, PROMPT, -2 - number, answer, COLORS[number], "ABC"[number])
    lanes.plot([PROMPT] * 2, [HEIGHT - 2, -1 - len(ANSWERS)], color=INK, linewidth=1.6, zorder=3)
    note(lanes, 0, -0.8, f"A tree: {PROMPT + sum(ANSWERS)} tokens", color=INK)
    lanes.set(xlim=(-0.3, x + 0.3), ylim=(-4.2, 1.6))
    title(lanes, "Three answers to one prompt")
    both = [tokens for answer in ANSWERS for tokens in (PROMPT, answer)]
    names = [name for answer in "ABC" for name in ("prompt", answer)]
    draw_attention(packed, both, "What packed tokens\nattend to", names=names, above=[[], [0], [], [2], [], [4]])
    draw_attention(
        tree,
        [PROMPT, *ANSWERS],
        "The same attention,\nprompt once",
        names=["prompt", *"ABC"],
        above=[[], [0], [0], [0]],
    )
    return figure
