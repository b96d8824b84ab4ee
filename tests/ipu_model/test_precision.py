"""Lower precision raises nothing but what is named; a report's page has every view, and is drawn.

With half partials, a model of halves has no more bytes of weights, state, accumulators, buffers and
waiting activations than that of floats, and its products take no more cycles. It can need more for
temporaries, because another way to spread a product is fastest then; and for code, where loops
exist for both types. With float partials sums lie beside a result of halves, and a product of few
inner elements takes longer: the matrix unit multiplies 16 halves at a time or 8 floats.
"""

import copy
import dataclasses
import functools
import json
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import poptorch
from helpers.browser import BROWSER, drawn
from helpers.pricing import meta, priced, two_stages
from helpers.wrapping import Calling, Having
from poptorch import Estimate, _systems
from poptorch._ipu_model import page, profile
from poptorch._ipu_model.constants import DEFAULT
from poptorch._ipu_model.products import Chip, spread
from poptorch._ipu_model.work import Product
from poptorch._systems import KINDS


def _chip(kind: str) -> Chip:
    return Chip(KINDS[kind], KINDS[kind].tiles, proportion=0.6)


sizes = st.integers(1, 4096)
products = st.builds(
    Product, sizes, sizes, sizes, st.just(4), st.just(False), st.integers(1, 64), st.booleans(),
)  # fmt: skip


@settings(max_examples=20, deadline=None, derandomize=True)
@given(products, st.sampled_from(sorted(KINDS)))
def test_products_of_halves_take_no_longer(product: Product, kind: str) -> None:
    def cycles(one: Product) -> float:
        best = spread(one, _chip(kind))
        assert best.bytes <= 0.6 * KINDS[kind].tile_bytes + 1e-6
        return best.cycles + best.steps * DEFAULT.step

    assert cycles(dataclasses.replace(product, itemsize=2, half=True)) <= cycles(product)


def test_halves_and_half_partials_each_halve_the_work_of_the_matrix_unit() -> None:
    """Multiplications per cycle and tile: 16, 32, 64. The first generation has no half partials."""

    def compute(kind: str, itemsize: int, half_partials: bool) -> float:
        return spread(Product(4096, 4096, 4096, itemsize, half_partials), _chip(kind)).compute

    assert compute("bow", 2, False) < 0.6 * compute("bow", 4, False)
    assert compute("bow", 2, True) < 0.6 * compute("bow", 2, False)
    assert compute("mk1", 2, True) > 0.9 * compute("mk1", 2, False)


class Tower(nn.Module):
    def __init__(self, layers: int, wide: int, between: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(wide, wide) for _ in range(layers))
        self.between = {
            "tanh": nn.Tanh(), "gelu": nn.GELU(), "softmax": nn.Softmax(-1),
            "norm": nn.LayerNorm(wide), "relu": nn.ReLU(),
        }[between]  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.between(layer(x))
        return poptorch.identity_loss(x, reduction="sum") if self.training else x


@functools.cache
def tower(dtype: torch.dtype, shape: tuple[int, int, str], rows: int, optimizer: str) -> Estimate:
    options = poptorch.Options()
    options.Precision.setPartialsType(dtype)
    batch = meta(4 * rows, shape[1], dtype=dtype)
    how = {"steps": 4, "optimizer": optimizer, "options": options, "system": "bow:1"}
    return priced(lambda: Tower(*shape).to(dtype), batch, **how)


towers = st.tuples(
    st.integers(1, 3), st.sampled_from([3, 16, 33, 300]),
    st.sampled_from(["tanh", "gelu", "softmax", "norm", "relu"]),
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=2, deadline=None, derandomize=True)
@given(towers, st.sampled_from([1, 8, 500]), st.sampled_from(["", "SGD", "AdamW", "LAMB"]))
@example((2, 300, "gelu"), 1, "AdamW")
@example((1, 33, "relu"), 500, "AdamW")
@example((2, 3, "softmax"), 500, "LAMB")
def test_models_of_halves_raise_nothing_else(shape, rows, optimizer) -> None:
    half, single = (tower(t, shape, rows, optimizer) for t in (torch.half, torch.float))
    for category, size in single.chips[0].always.items():
        if category not in ("code", "gaps and imbalance"):
            assert half.chips[0].always[category] <= size
    assert _lasting(half) <= _lasting(single) + single.chips[0].peak["temporary"]
    code = half.chips[0].always["code"] - single.chips[0].always["code"]
    assert code <= 1472 * DEFAULT.code_step * 4  # a conversion, and updates in both types
    assert half.cycles <= single.cycles


def test_halves_are_smaller_and_faster() -> None:
    half, single = (tower(t, (2, 2000, "tanh"), 1000, "SGD") for t in (torch.half, torch.float))
    assert half.chips[0].always["weights"] < 0.51 * single.chips[0].always["weights"]
    peaks = [dict(each.chips[0].peak) for each in (half, single)]
    for same in ("accumulators", "code"):  # of both types
        assert peaks[0].pop(same) == pytest.approx(peaks[1].pop(same), rel=0.01)
    assert sum(peaks[0].values()) < 0.6 * sum(peaks[1].values())
    assert half.cycles < 0.6 * single.cycles


def test_updates_that_read_the_gradients_of_two_weights_are_priced() -> None:
    price = functools.partial(priced, lambda: Tower(1, 8, "tanh"), meta(4, 8), optimizer="AdamW")
    assert price().cycles < price(max_grad_norm=1.0).cycles


def _lasting(estimate: Estimate) -> float:
    """Bytes at the fullest moment but for what may be more in half, and the share for gaps."""
    peak = estimate.chips[0].peak
    return sum(peak.values()) - sum(peak[k] for k in ("temporary", "code", "gaps and imbalance"))


ONES = torch.ones(64, 256)


def cost(function, *shape: int, dtype: torch.dtype = torch.float32) -> poptorch.Estimate:
    return priced(lambda: Calling(function), meta(*shape, dtype=dtype), system="bow:1")


def flops(estimate: poptorch.Estimate) -> int:
    return sum(row.flops for row in estimate.operators)


def cycles(estimate: poptorch.Estimate) -> float:
    return sum(row.cycles for row in estimate.operators)


def test_attention_is_its_two_products_and_the_softmax() -> None:
    samples, heads, length, wide = shape = 2, 4, 32, 16
    half, exact = (cost(lambda x: F.scaled_dot_product_attention(x, x, x), *shape, dtype=dtype)
                   for dtype in (torch.float16, torch.float32))  # fmt: skip
    assert flops(half) == 2 * 2 * samples * heads * length * length * wide
    assert any("softmax" in row.name for row in half.operators)
    assert cycles(half) < cycles(exact)  # products of halves, not of floats


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_lstm_is_a_product_for_all_steps_and_one_for_each(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        layer = nn.LSTM(8, 16, batch_first=True, dtype=dtype)
    made = [cost(lambda x: layer(x)[0], 4, steps, 8, dtype=dtype) for steps in (5, 9)]
    assert [flops(one) for one in made] == [2 * 4 * t * 4 * 16 * (8 + 16) for t in (5, 9)]
    assert 1.5 < cycles(made[1]) / cycles(made[0]) <= 9 / 5  # step after step
    assert sum("lstm_layer" in row.name for row in made[0].operators) == 1


def test_products_of_groups_and_in_pieces_are_products_which_take_longer() -> None:
    rows, wide, out, groups = 8, 4, 16, 2
    weights = torch.empty(groups, wide, out, device="meta")
    ends = torch.empty(groups, dtype=torch.int32, device="meta")
    made = cost(lambda x: F.grouped_mm(x, weights, offs=ends), rows, wide)
    assert flops(made) == 2 * rows * wide * out
    assert sum("grouped_product" in row.name for row in made.operators) == 1
    mode, whole = poptorch.MatMulSerializationMode.OutputChannels, cost(lambda x: x @ x.T, 64, 32)
    pieces = cost(lambda x: poptorch.serializedMatMul(x, x.T, mode, 4), 64, 32)
    assert flops(whole) == flops(pieces) == 2 * 64 * 64 * 32
    assert cycles(pieces) > 2 * cycles(whole)


def test_a_loop_costs_its_body_as_often_as_it_runs() -> None:
    def looped(count: int):
        return lambda x: poptorch.for_loop(count, lambda y: torch.tanh(y @ y), [x])[0]

    three, thirty = (cost(looped(count), 16, 16) for count in (3, 30))
    assert (flops(three), flops(thirty)) == (3 * 2 * 16**3, 30 * 2 * 16**3)
    assert 8 * cycles(three) < cycles(thirty) < 10 * cycles(three)


@pytest.mark.parametrize("function, times", [
    (lambda x: torch.sort(x)[0], 3), (lambda x: torch.topk(x, 16)[0], 3),
    (lambda x: torch.fft.rfft(x).real, 3), (lambda x: torch.cdist(x, x), 3),
    (lambda x: F.bilinear(x, x, torch.ones(8, 256, 256)), 3),
    (lambda x: F.ctc_loss(x[:, None], torch.ones(1, 9, dtype=torch.long), (64,), (9,)), 3),
    (F.glu, 1), (F.mish, 1), (F.hardsigmoid, 1), (lambda x: torch.atan2(x, ONES), 1),
    (lambda x: F.prelu(x, ONES[0, :1]), 1),
])  # fmt: skip
def test_what_is_known_costs_more_than_an_addition(function, times: int, addition: float) -> None:
    estimate = cost(function, 64, 256)
    assert cycles(estimate) > times * addition
    assert not any("operator" in guess.name for guess in estimate.guesses)


@pytest.fixture(scope="module")
def addition() -> float:
    return cycles(cost(lambda x: x + 1, 64, 256))


def test_what_nothing_is_known_of_is_a_guess_and_what_only_says_something_is_free() -> None:
    (guess,) = [guess for guess in cost(torch.digamma, 64, 256).guesses if "operator" in guess.name]
    assert guess.name == "operator digamma"
    assert 0 < guess.share <= 1
    said = cost(lambda x: torch.tanh(poptorch.nop(x)), 64, 256)
    assert cycles(said) == cycles(cost(torch.tanh, 64, 256))


def test_a_mask_of_dropout_is_drawn_and_scaled_in_one_loop() -> None:
    estimate = cost(lambda x: F.dropout(x, training=True), 64, 256)
    loops = {row.name: row.cycles for row in estimate.operators if row.cycles}
    assert len(loops) == 2, loops  # drawing, and multiplying by it


def halved(share: float | None) -> Having:
    """Two products, of which the first may be told how much of a tile it may use."""

    def forward(model: Having, x: torch.Tensor) -> torch.Tensor:
        x = model.first(x)
        return model.second(x if share is None else poptorch.set_available_memory(x, share))

    first, second = nn.Linear(1024, 1024), nn.Linear(1024, 1024)
    return Having(forward, first=first, second=poptorch.BeginBlock(second, "second", ipu_id=1))


def temporary(share: float | None = None, **proportions: float) -> list[float]:
    options = poptorch.Options().setAvailableMemoryProportion(proportions)
    made = priced(lambda: halved(share), meta(2 * 8192, 1024), steps=2, options=options)
    return [chip.peak["temporary"] for chip in made.chips]


def test_products_use_what_their_chip_or_the_user_lets_them() -> None:
    usual = temporary()
    assert usual[0] == usual[1]
    chip = temporary(IPU1=0.05)
    assert (chip[0], chip[1] < usual[1] / 2) == (usual[0], True)
    one = temporary(0.05)
    assert (one[0] < usual[0] / 2, one[1]) == (True, usual[1])


def test_an_index_that_is_repeated_over_rows_looks_up_rows() -> None:
    index = functools.partial(torch.zeros, dtype=torch.long)
    rows = cycles(cost(lambda x: x.index_select(0, index(64)), 64, 256))
    assert cycles(cost(lambda x: torch.gather(x, 0, index(64, 1).expand(-1, 256)), 64, 256)) == rows
    assert cycles(cost(lambda x: torch.gather(x, 0, index(64, 256)), 64, 256)) > 2 * rows


VIEWS = ("measured", "summary", "memory", "liveness", "schedule", "operators", "program",
         "settings", "comparison")  # fmt: skip
MARKUP = "</script><!--<script>alert(1)</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def content():
    """A profile of two stages, with made-up measurements."""
    estimate = priced(two_stages, meta(8, 64), steps=2, system="bow:2", advice=True)
    calls = [profile.Call(3 * at, 0, 0.25, 0.5, 0.25) for at in range(2)]  # timed by parts
    calls += [profile.Call(6 + 3 * at, 2, 0.5, each, 0.25) for at, each in enumerate((2, 1, 0))]
    product = profile.OperatorTime("F", "aten.addmm", "0", "net.py:3", 2, 0.0625)
    times = ((profile.ActionTime("forward", 2, 0.125),), (product,))
    measured = profile.Measured("</script><b>", 1.0, 5, tuple(calls), 1 << 20, *times)
    kind, settings = _systems.KINDS["bow"], {"loops.replicas": "1"}
    return profile.profile(dataclasses.asdict(estimate), kind, measured, settings)


def test_every_view_has_what_it_shows(content) -> None:
    page_text = page.html(content, content)
    parts = re.findall(r'<section id="(\w+)">(.*?)</section>', page_text, re.DOTALL)
    views = {name: re.sub(r"\s*\n\s*", "", text) for name, text in parts}
    assert tuple(views) == VIEWS
    marked = {name for name, t in views.items() if "<h2>" in t and ">estimated</small>" in t}
    assert marked == set(VIEWS) - {"measured", "settings"}
    priced = content["estimated"]
    first, second = priced["chips"]
    peak = max(sum(chip["peak"].values()) for chip in (first, second))
    assert f"It fits: the fullest IPU needs {peak / second['limit']:.0%} of its" in views["summary"]
    assert f"<b>{priced['seconds'] * 1e3:.3g} ms</b>per call" in views["summary"]
    assert f"<code>{priced['advice'][0]['change']}</code>" in views["summary"]
    widths = re.findall(r'width:([\d.e-]+)%" title="(\w+)', views["memory"])
    full = sum(sum(chip["peak"].values()) / chip["limit"] for chip in (first, second))
    assert sum(float(width) for width, _ in widths) / 100 == pytest.approx(full)
    assert "fullest tile" in views["memory"]
    assert "H1472V100Z" in views["memory"]  # the last tile
    assert "param.0.weight" in views["liveness"]
    seen = re.findall(r"<title>(\S+): [\d.]+ MiB; largest: (\S+ \d),", views["liveness"])
    assert seen[:2] == [("0F0", "addmm 0"), ("0F1", "addmm 0")]
    actions = re.findall(r"<title>(\d\w+): [\d.e-]+ ms from", views["schedule"])
    assert sorted(actions) == ["0F0", "0F1", "1F0", "1F1"]
    assert "addmm" in views["operators"]
    here = views["measured"]
    assert "<b>1,750 ms</b>per call, median" in here  # without the first two
    assert ">62.5<" in here  # ms
    (row,) = [r for r in priced["operators"] if (r["name"], r["module"]) == ("aten.addmm", "0")]
    modelled = 2 * (row["compute"] + row["exchange"] + row["sync"]) / 1.85e9 * 1e3
    assert f'data-value="{modelled}"' in here
    assert "0F on IPU 0, 2 times" in views["program"]
    assert ">125<" in here
    assert here.count("M1.1 ") == 4  # the second call, in four parts
    assert "&lt;/script&gt;" in here
    assert "loops.replicas" in views["settings"]
    assert "+0.0%" in views["comparison"]


def test_a_page_before_the_first_call_and_one_of_an_estimate_say_so(content) -> None:
    text = page.html({**content, "measured": {**content["measured"], "calls": 0, "first": ()}})
    assert "<b>no call yet</b>" in text
    assert text.index("Measured on this machine") < text.index("It fits")
    text = page.html({**content, "measured": None})
    assert "estimated for IPUs; nothing was run" in text
    assert "on this machine" not in text


def test_a_page_is_small_names_its_script_and_fetches_nothing(content) -> None:
    text = page.html({**content, "name": "train.py: Net, training"}, content)
    assert len(text) < 50_000
    close = {**content, "estimated": {**content["estimated"], "verdict": "close"}}
    assert '<p class="verdict close">Close, 0.9 to 1.1 of the limit: the full' in page.html(close)
    assert "<title>train.py: Net, training on bow:2</title>" in text
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", text)
    assert text.count("</script>") == 1
    assert "prefers-color-scheme: dark" in text
    assert "<pattern" not in text  # solid fills only


def with_markup(value):
    """Yield copies of nested data, in each of which one value, or one key, is markup."""
    if isinstance(value, (dict, list)):
        items = list(value.items() if isinstance(value, dict) else enumerate(value))
        for key, inside in items[:40]:
            for other in with_markup(inside):
                changed = copy.copy(value)
                changed[key] = other
                yield changed
        if isinstance(value, dict) and value:
            yield {MARKUP if key == items[0][0] else key: inside for key, inside in items}
    else:
        yield MARKUP


def test_no_value_of_a_profile_becomes_markup_wherever_it_stands(content) -> None:
    small = json.loads(json.dumps(content))
    priced = small["estimated"]
    for name in ("operators", "schedule", "chips", "advice", "guesses"):
        priced[name] = priced[name][:1]
    for chip in priced["chips"]:
        chip["largest"], chip["live"] = chip["largest"][:1], chip["live"][:1]
    whole, written = page.html(small, small), 0
    for hostile in with_markup(small):
        try:
            text = page.html(hostile, hostile)
        except (LookupError, TypeError, ValueError, AttributeError):
            continue  # ``poptorch report`` says that it is no report
        written += 1
        for tag in ("<script", "</script", "<img", "<!--"):
            assert text.count(tag) == whole.count(tag)
    assert written > 30


MEASURE = """
Object.assign(parent.document.body.dataset, {
  views: [...document.querySelectorAll("section")].map(each => each.id).join(" "),
  fold: document.querySelector(".advice").getBoundingClientRect().bottom,
  color: getComputedStyle(document.querySelector(".verdict")).color,
});"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="chromium draws the page, and is not installed")
@pytest.mark.parametrize(
    ("width", "scheme", "color"), [(390, 0, "rgb(87, 211, 100)"), (1280, 1, "rgb(26, 127, 55)")]
)
def test_a_browser_draws_every_view_inside_its_column(content, tmp_path, width, scheme, color):
    """Dark and light; what was measured, verdict and advice are above a phone's fold."""
    advice = {"change": "options." + 30 * "long", "saves": 1.0, "costs": 1.0, "fits": True}
    changed = {**content, "settings": {"line": 100 * "wide"}}
    changed["estimated"] = {**content["estimated"], "advice": [advice, advice]}
    page_text, colors = page.html(changed, content), f"preferredColorScheme={scheme}"
    seen = drawn(page_text, tmp_path, width, MEASURE, f"--blink-settings={colors}")
    assert (seen["ready"], seen["width"], seen["wide"]) == ("yes", str(width), "")
    assert (seen["views"].split(), seen["color"]) == (list(VIEWS), color)
    assert float(seen["fold"]) < 844
