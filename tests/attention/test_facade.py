"""A route in one line and in several."""

from hf_packing.attention.by_segment import ModulePlan
from hf_packing.attention.route import Facts, Method, Route
from hf_packing.attention.token_axes import TokenAxes


def test_a_route_in_one_line_and_in_several():
    plans = tuple(ModulePlan(f"layers.{i}.mixer", "Identity", TokenAxes("", 41), TokenAxes("", 41)) for i in range(2))
    for plan in plans:
        plan.kind = "Mixer"
    route = Route(Method("packed_varlen"), plans, 0.5, facts=Facts(unproven="the model draws random numbers"))
    assert repr(route) == "Route('varlen + segments', modules={'Mixer': 2}, packed_share=0.50)"
    assert route.describe().splitlines() == [
        "route: varlen + segments, 50% of the parameters stay packed",
        "by segment: 2 Mixer",
        "training mode not proven: the model draws random numbers",
    ]
