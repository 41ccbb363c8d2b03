"""Write the measurements of all architectures as a page of Markdown."""

import re
from collections.abc import Mapping, Sequence
from math import isfinite, isnan
from statistics import median

from tools.survey.heads import EXACT as EXACT_ROWS
from tools.survey.heads import HEADS, MeasuredHead
from tools.survey.measure import EXACT, ISOLATED_WITHOUT_CACHE, Measured
from tools.survey.pictures import MeasuredPictures
from tools.survey.ranks import MeasuredRanks
from tools.survey.trees import MeasuredTrees

COMMAND = "python -m tools.survey"

PICTURES = "Texts and pictures"

TREES = "Shared prefixes"

SPLIT = "Documents on two ranks"

TITLES = {"causal": "Causal language models", "masked": "Masked language models"}

STOCK_IS_WRONG = 1e-3
"""A larger difference between an unpatched model's outputs for a padded row and for the row alone is no rounding."""

ROUNDING = 1e-12
"""Differences in float64 that are no larger are rounding."""

_UNTESTABLE = "isolation cannot be tested"
"""What is said of a model whose logits hardly depend on earlier tokens: that documents do not change shows nothing."""

_HEAD = ("architecture", "unpatched", "route", "run by segment", "packed", "logits", "gradients", "why no faster route")


def page(
    results: Sequence[Measured],
    versions: str,
    heads: Sequence[MeasuredHead] = (),
    pictures: Sequence[MeasuredPictures] = (),
    trees: Sequence[MeasuredTrees] = (),
    ranks: Sequence[MeasuredRanks] = (),
) -> str:
    """Return the full text of docs/SUPPORTED_MODELS.md."""
    lines = ["# Supported models", "", *_summary(results, versions)]
    for kind, title in TITLES.items():
        own = sorted((each for each in results if each.kind == kind), key=lambda each: each.name)
        lines += _table(title, _HEAD, [_cells(each) for each in own if each.route])
        refused = [
            [each.name, _stock(each), _one_line(each.reason, 400)] for each in own if each.built and not each.route
        ]
        lines += _table(f"Refused: {title.lower()}", ("architecture", "unpatched", "reason"), refused)
        absent = [[each.name, _one_line(each.reason, 160)] for each in own if not each.built]
        lines += _table(f"Not measured: {title.lower()}", ("architecture", "why no tiny model could be built"), absent)
    lines += _other_heads(heads) if heads else []
    lines += _pictures(pictures) if pictures else []
    text = "\n".join(lines) + "\n"
    text = with_trees(text, trees) if trees else text
    return with_ranks(text, ranks) if ranks else text


def with_pictures(text: str, pictures: Sequence[MeasuredPictures]) -> str:
    """Return the text of a page with other measurements of pictures."""
    return _with_sections(text, PICTURES, _pictures(pictures), before=(TREES, SPLIT))


def with_trees(text: str, trees: Sequence[MeasuredTrees]) -> str:
    """Return the text of a page with other measurements of trees, also in the table of causal models."""
    text = _with_sections(text, TREES, _trees(trees), before=(SPLIT,))
    return _with_column(text, "causal", "trees", trees)


def with_ranks(text: str, ranks: Sequence[MeasuredRanks]) -> str:
    """Return the text of a page with other measurements of rows on two ranks, also in the tables of models."""
    text = _with_sections(text, SPLIT, _on_ranks(ranks), before=())
    for kind in TITLES:
        text = _with_column(text, kind, "on 2 ranks", [each for each in ranks if each.kind == kind])
    return text


def _with_column(text: str, kind: str, column: str, results: Sequence[MeasuredTrees | MeasuredRanks]) -> str:
    """Return the text of a page with a column of results before the last column of the table of a kind of models.

    If the table has a column of this name, it is replaced.
    """
    lines, title = text.split("\n"), f"## {TITLES[kind]}"
    if title not in lines:
        return text
    begin = lines.index(title) + 2
    end = lines.index("", begin)
    known = {each.name: each.status for each in results if each.status != "not built"}
    rows = [line.removeprefix("| ").split(" | ") for line in lines[begin:end]]
    place = rows[0].index(column) if column in rows[0] else len(rows[0]) - 1
    after = place + (column in rows[0])
    new = [column, "---", *(known.get(name, "") for name, *_ in rows[2:])]
    lines[begin:end] = [
        f"| {' | '.join([*cells[:place], cell, *cells[after:]])}" for cells, cell in zip(rows, new, strict=True)
    ]
    return "\n".join(lines)


def _with_sections(text: str, name: str, lines: Sequence[str], before: tuple[str, ...]) -> str:
    """Return the text of a page whose sections with a name in their titles are replaced.

    Args:
        text: the page.
        name: the name, such as "Shared prefixes".
        lines: the lines of the new sections.
        before: the new sections stand before the first section whose title begins with one of these.
    """
    sections = [each for each in text.split("\n## ") if name.lower() not in each.partition("\n")[0].lower()]
    place = next((at for at, each in enumerate(sections) if each.startswith(before)), len(sections))
    new = ("\n".join(lines) + "\n").removeprefix("\n## ")
    return "\n## ".join([*sections[:place], new, *sections[place:]])


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a section, or no lines if there are no rows."""
    return ["", f"## {title}", "", *map(_row, [head, ["---"] * len(head), *rows])] if rows else []


def _summary(results: Sequence[Measured], versions: str) -> list[str]:
    taken = [each for each in results if each.route]
    counts = {kind: sum(each.kind == kind and each.exact for each in taken) for kind in TITLES}
    surveyed = {kind: sum(each.kind == kind for each in results) for kind in TITLES}
    built = {kind: sum(each.kind == kind and each.built for each in results) for kind in TITLES}
    testable = [each for each in results if each.built and _stock(each) != _UNTESTABLE]
    varlen = sum(each.route == "varlen" for each in taken)
    shares = [each.packed_share for each in taken if each.route != "varlen"]
    isolated = sum(each.stock == "isolated" for each in testable)
    lines = [
        f"Made by `{COMMAND}` with {versions}, on CPU. The survey builds",
        "a tiny random float32 model of each architecture and of some variants, from the configuration class alone.",
        f"This works for {built['causal']} of {surveyed['causal']} causal and {built['masked']} of "
        f"{surveyed['masked']} masked models; the others are listed as not measured.",
        "`patch_model` finds the route of your model by experiment, as the survey does, and does not read this page.",
        "",
        f"After patching, {counts['causal']} of {built['causal']} causal and {counts['masked']} of {built['masked']} "
        "masked models are exact, whichever arguments mark the documents. Exact means that",
        f"logits differ by at most {EXACT:g} from logits of the same documents run separately, no logit changes by",
        f"more when another document changes, and gradients differ by at most {EXACT:g} of the largest gradient.",
        f"Larger differences count as exact only if rounding alone causes them; such models: {_exceptions(taken)}.",
        f"Gradients that differ by more are measured in float64, where a ReLU near 0 does not jump: {_retried(taken)}.",
        f"{varlen} models take only the `varlen` route.",
    ]
    if shares:
        lines += [f"The other {len(shares)} run a median of {median(shares):.0%} of parameters on the packed row."]
    unproven = [f"{each.name} ({_one_line(each.unproven, 160)})" for each in taken if each.unproven]
    which = f"all but {', '.join(unproven)}" if unproven else "all"
    lines += [f"Models that were also verified in training mode, with dropout off: {which}."]
    without_cache = isolated + sum(each.stock == ISOLATED_WITHOUT_CACHE for each in testable)
    return [
        *lines,
        f"Before patching, {isolated} of the {len(testable)} models in which it can be tested isolate documents",
        f"as they are called by default, and {without_cache} with use_cache=False, as Trainer and SFTTrainer call "
        "them.",
    ]


def _other_heads(results: Sequence[MeasuredHead]) -> list[str]:
    """Return the lines about models with other heads than a language model's, on padded batches."""
    counts = []
    for head in HEADS:
        own = [each for each in results if each.head == head and each.status not in ("not built", "cannot run alone")]
        counts.append(f"{sum(each.status == 'exact' for each in own)} of {len(own)} for {head}")
    names = sorted({each.name for each in results if each.status != "not built"})
    known = {(each.head, each.name): each for each in results}
    rows = [[name, *(_cell_of_head(known.get((head, name))) for head in HEADS)] for name in names]
    refused = [[each.name, each.head, _one_line(each.reason, 300)] for each in results if each.status == "refused"]
    exact = [each for each in results if each.status == "exact"]
    wrong = [
        [each.name, each.head, f"{each.stock_right:.0e}" if isfinite(each.stock_right) else "not finite, or an error"]
        for each in exact
        if not each.stock_right <= STOCK_IS_WRONG
    ]
    on_the_left = sum(not each.stock_left <= STOCK_IS_WRONG for each in exact)
    return [
        "",
        "## Other heads, on padded batches",
        "",
        "A patched model takes a padded batch, and its backbone runs without the padding. Here, float64 models get",
        "rows of 2 to 22 tokens, padded on the right and on the left. Exact means that the outputs and gradients of",
        f"every row differ by at most {EXACT_ROWS:g} from those of the row alone. Of the models that can run alone,",
        f"these are exact: {', '.join(counts)}.",
        '"By length": the backbone takes no packed rows, and runs on the rows of equal length together.',
        "",
        f"Before patching, padding on the left changes the outputs of {on_the_left} of these {len(exact)} models by",
        f"more than {STOCK_IS_WRONG:g}, and padding on the right those of {len(wrong)}, which a table lists.",
        *_table("Heads", ("architecture", *HEADS), rows),
        *_table("Refused heads", ("architecture", "head", "reason"), refused),
        *_table(
            "Unpatched models whose outputs depend on padding on the right",
            ("architecture", "head", "largest difference"),
            wrong,
        ),
    ]


def _pictures(results: Sequence[MeasuredPictures]) -> list[str]:
    """Return the lines about models that see pictures, on padded batches."""
    found = {status: sorted((r for r in results if r.status == status), key=lambda r: r.name) for status in _RESULTS}
    built = sum(len(found[status]) for status in ("exact", "refused", "WRONG", "as unpatched"))
    taken = [each for status in ("exact", "WRONG", "as unpatched") for each in found[status]]
    rows = [
        [each.name, each.status + (", by length" if each.by_length else ""), _figure(each.difference)]
        + [_figure(each.gradient), _one_line(each.reason, 160)]
        for each in sorted(taken, key=lambda each: each.name)
    ]
    lines = [
        "",
        f"## {PICTURES}, on padded batches",
        "",
        f"`{COMMAND} --pictures` measures this section alone. A patched model takes padded batches of documents",
        "with and without pictures: its vision tower runs as before, and its text backbone without the padding. Here,",
        "float64 models get documents with no, one and two pictures, padded on the right or left, and one padded row.",
        "Exact means that the backbone gets only the real tokens, and that the logits of every row and the gradients",
        f"of all parameters, of text and vision, differ by at most {EXACT_ROWS:g} from those of each document alone,",
        f"with its own pictures, on the unpatched model. Of {built} models, {len(found['exact'])} are exact, "
        f"{len(found['refused'])} are refused with",
        f'the reason, and {len(found["WRONG"])} are wrong. "As unpatched": the same as the unpatched model on the',
        "same batch, in which rows already affect each other.",
    ]
    lines += _table(PICTURES, ("architecture", "result", "logits", "gradients", "problem"), rows)
    refused = [[each.name, _one_line(each.reason, 300)] for each in found["refused"]]
    lines += _table(f"Refused: {PICTURES.lower()}", ("architecture", "reason"), refused)
    why = [[r.name, _one_line(r.reason, 160)] for status in _NOT_MEASURED for r in found[status]]
    return lines + _table(f"Not measured: {PICTURES.lower()}", ("architecture", "why"), sorted(why))


def _trees(results: Sequence[MeasuredTrees]) -> list[str]:
    """Return the lines about rows of trees."""
    own = sorted(results, key=lambda each: each.name)
    counts = {status: sum(each.status == status for each in own) for status in ("exact", "refused", "WRONG")}
    unstable = sum("not stable" in each.reason for each in own if each.status == "refused")
    rows = [
        [each.name, _result_of_trees(each), _figure(max(each.difference, each.change)), _figure(each.gradient)]
        + [_numbers(each.modules), _one_line(each.reason, 160)]
        for each in own
        if each.status in ("exact", "WRONG")
    ]
    lines = [
        "",
        f"## {TREES}, in rows of trees",
        "",
        f"`{COMMAND} --trees` measures this section, and the column of trees below. In a row of trees, a prefix",
        "that several documents share stands once, and a patched model computes it once. Here, float32 models get",
        "two trees, of four and two levels, and a document alone. Exact means that the logits of every document",
        f"differ by at most {EXACT:g} from those of the document alone on the unpatched model, that changing the",
        "tokens of a segment changes no logit by more that is not below the segment, and that the gradients of two",
        f"losses, by token and by document, differ by at most {EXACT:g} of the largest gradient. Larger differences",
        "count as exact if rounding alone causes them, and larger differences of gradients are measured again in",
        "float64; the table then says so.",
        "",
        f"Of {sum(counts.values())} causal models, {counts['exact']} are exact, {counts['refused']} are refused with",
        f"the reason, and {counts['WRONG']} are wrong. {unstable} of those refused have prefixes that are not stable:",
        "even without packing, their outputs for a prefix depend on what follows, by up to the figure in the table.",
        "The others take no packed rows.",
    ]
    head = ("architecture", "result", "logits", "gradients", "run on each path", "problem")
    lines += _table(TREES, head, rows)
    refused = [
        [each.name, _figure(each.prefix), _one_line(each.reason, 300)] for each in own if each.status == "refused"
    ]
    lines += _table(f"Refused: {TREES.lower()}", ("architecture", "logits of a prefix", "reason"), refused)
    absent = [[each.name, _one_line(each.reason, 160)] for each in own if each.status == "not built"]
    return lines + _table(f"Not measured: {TREES.lower()}", ("architecture", "why"), absent)


def _on_ranks(results: Sequence[MeasuredRanks]) -> list[str]:
    """Return the lines about rows on two ranks."""
    found = {status: [each for each in results if each.status == status] for status in ("exact", "refused", "WRONG")}
    figures = [max(each.difference, each.gradient) for each in found["exact"] if not each.in_float32]
    in_float32 = ", ".join(each.name for each in found["exact"] if each.in_float32) or "none"
    lines = [
        "",
        f"## {SPLIT}",
        "",
        f"`{COMMAND} --ranks` measures this section, and the column of ranks below. Two gloo processes run a row of",
        "documents together, cut into two equal slices, and with two chunks of every document on each process. Exact",
        f"means that in float64 the logits of all tokens differ by at most {EXACT_ROWS:g} from those of the row on one",
        "process, and the gradients, summed over the processes, by at most",
        f"{EXACT_ROWS:g} of the largest gradient. Models that do not run in float64 are measured in float32, with",
        f"{EXACT:g} as the limit: {in_float32}.",
        "",
        f"Of {sum(map(len, found.values()))} models, {len(found['exact'])} are exact, {len(found['refused'])} are "
        f"refused with the reason, and {len(found['WRONG'])} are wrong.",
        f"{sum(figure <= ROUNDING for figure in figures)} of {len(figures)} in float64 differ by at most {ROUNDING:g};",
        "the others have parts that compute in float32.",
    ]
    for kind in TITLES:
        for status, title in (("refused", "Refused"), ("WRONG", "Wrong")):
            own = sorted((each for each in found[status] if each.kind == kind), key=lambda each: each.name)
            rows = [
                [each.name, _one_line(each.reason, 300) or _figure(max(each.difference, each.gradient))] for each in own
            ]
            lines += _table(f"{title}: {SPLIT.lower()}, {TITLES[kind].lower()}", ("architecture", "reason"), rows)
    return lines


def _result_of_trees(each: MeasuredTrees) -> str:
    if each.status == "WRONG":
        return each.status
    figures = [each.difference, *([] if each.gradient_in_float64 else [each.gradient])]
    notes = ["up to rounding"] if max(figures) > EXACT else []
    return ", ".join(["exact", *notes, *(["gradients in float64"] if each.gradient_in_float64 else [])])


def _numbers(modules: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in modules.items())


_NOT_MEASURED = ("not built", "cannot run alone")

_RESULTS = ("exact", "refused", "WRONG", "as unpatched", *_NOT_MEASURED)


def _figure(value: float) -> str:
    return "" if isnan(value) else f"{value:.0e}"


def _cell_of_head(each: MeasuredHead | None) -> str:
    if each is None:
        return ""
    if each.status != "exact":
        return "" if each.status == "not built" else each.status
    return "exact, by length" if each.by_length else "exact"


def _exceptions(taken: Sequence[Measured]) -> str:
    """Return the names and figures of the models that count as exact only because of rounding."""
    figures = {each.name: max(each.change, each.difference, each.gradient) for each in taken if each.exact}
    beyond = [f"{name} {figure:.0e}" for name, figure in figures.items() if figure > EXACT]
    return f"{', '.join(beyond) or 'none'}"


def _retried(taken: Sequence[Measured]) -> str:
    """Return the names of the models whose gradients were measured in float64."""
    return ", ".join(each.name for each in taken if each.gradient_in_float64) or "none"


def _stock(each: Measured) -> str:
    """Return how the unpatched model treats packed documents, if this can be tested."""
    return _UNTESTABLE if not each.route and _UNTESTABLE in each.reason else each.stock


def _cells(each: Measured) -> list[str]:
    why = _one_line(each.reason, 160) if each.route != "varlen" else ""
    figures = [f"{each.packed_share:.0%}", f"{max(each.difference, each.change):.0e}", f"{each.gradient:.0e}"]
    return [each.name, each.stock, each.route, _numbers(each.modules), *figures, why]


def _one_line(text: str, longest: int) -> str:
    """Return a text as one line; a longer one ends with its last sentence or clause that fits, or with a whole word."""
    text = re.sub(r"\s+", " ", text).replace("|", "\\|").strip()
    if len(text) <= longest:
        return text
    begin = text[: longest - 3].rstrip()
    sentences = re.match(r"(.*)[.;] ", begin)
    return sentences[1] if sentences else begin.rpartition(" ")[0] + " ..."


def _row(items: Sequence[str]) -> str:
    return f"| {' | '.join(items)} |"
