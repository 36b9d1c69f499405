"""What the pictures show is what the record holds; that they are handsome was looked at."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from folders import write_run
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.image import imread

from coterie.errors import RecordError
from coterie.report import figures
from coterie.report.figures import draw
from coterie.report.tables import collect, comparisons

TRUE = np.array([[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]])
W = np.array([[0.4, 0.1, 0.3, 0.2], [0.1, 0.5, 0.1, 0.3], [0.35, 0.05, 0.5, 0.1], [0.1, 0.2, 0.1, 0.6]])
UNIFORM = np.full((4, 4), 0.25)


def fill(out: Path) -> None:
    """Two seeds of three algorithms on four clients in two groups that do not lie side by side."""
    for seed in (0, 1):
        shift = 0.1 * seed
        write_run(out, "local", seed, np.array([0.4, 0.5, 0.6, 0.7]) + shift, graphs={"round-000001": np.eye(4)})
        graphs = {"round-000001": UNIFORM, "round-000008": W, "true": TRUE}
        write_run(
            out, "cobo", seed, np.array([0.6, 0.6, 0.5, 0.8]) + shift, graphs=graphs, sent=1000, groups=[0, 1, 0, 1]
        )
        write_run(out, "fedavg", seed, np.array([0.2, 0.3, 0.3, 0.2]) + shift, sent=10**6)


def panels(figure: figures.Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.images and axes.get_xlabel() == "to whom"]


def test_everything_is_drawn_and_nothing_else(out: Path) -> None:
    fill(out)
    paths = draw(out)
    assert {p.name for p in paths} == {"curves.png", "clients.png", "gains.png", "cost.png", "graph-cobo.png"}
    assert {p.name for p in (out / "figures").iterdir()} == {p.name for p in paths}
    for path in paths:
        picture = imread(path)
        assert min(picture.shape[:2]) > 300
        assert picture[..., :3].std() > 0.05


def test_what_is_not_finished_is_left_out(out: Path) -> None:
    write_run(out, "local", 0, [0.5, 0.5])
    write_run(out, "fedavg", 0, [0.5, 0.5], status="failed")
    draw(out)
    shutil.rmtree(out / "local")
    with pytest.raises(RecordError, match=r"no run in .* is finished"):
        draw(out)


def test_curves_are_means_over_seeds_of_means_over_clients(out: Path) -> None:
    fill(out)
    (compared,) = comparisons(collect([out]))
    looks = figures._looks([row.name for row in compared.rows])
    figure = figures._curves(compared, looks)
    assert figure is not None
    accuracy, loss = figure.axes
    line = next(x for x in accuracy.lines if x.get_color() == looks["fedavg"].colour)
    assert list(line.get_xdata()) == [1, 2, 4, 8]
    grown = 1 - 0.8 * np.exp(-3 * np.array([1, 2, 4, 8]) / 8)
    np.testing.assert_allclose(line.get_ydata(), 100 * 0.30 * grown)  # mean of 0.25 and 0.35
    line = next(x for x in loss.lines if x.get_color() == looks["fedavg"].colour)
    np.testing.assert_allclose(line.get_ydata(), 1.2 - 0.30 * grown)
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["cobo", "local", "fedavg"]


def test_collaborators_are_those_of_the_clients_that_were_there(out: Path) -> None:
    counts = {0: [[4, 2, 0], [3, 1, 2]], 1: [[2, 2, 0], [1, 1, 1]]}  # seed → rounds × clients; the last comes late
    for seed, rounds in counts.items():
        run = write_run(out, "allforone-bin", seed, [0.5] * 3)
        with (run / "metrics.jsonl").open("a") as lines:
            for t, (each, ok) in enumerate(zip(rounds, ([True, True, False], [True] * 3), strict=True)):
                told = {"round": t, "kind": "training", "loss": None, "ok": ok, "extra": {"collaborators": each}}
                lines.write(json.dumps(told) + "\n")
    write_run(out, "local", 0, [0.5] * 3)
    (compared,) = comparisons(collect([out]))
    figure = figures._collaborators(compared, figures._looks(["local", "allforone-bin"]))
    assert figure is not None
    (line,) = figure.axes[0].lines
    np.testing.assert_allclose(line.get_ydata(), [(3 + 2) / 2, (2 + 1) / 2])


@pytest.mark.parametrize(("least", "scale"), [(0.1, "linear"), (1e-5, "log")])
def test_an_axis_is_logarithmic_where_values_span_decades(out: Path, least: float, scale: str) -> None:
    write_run(out, "local", 0, [(1.2 - least) / (1 - 0.8 * np.exp(-3))])  # the loss at which it ends
    (compared,) = comparisons(collect([out]))
    figure = figures._curves(compared, figures._looks(["local"]))
    assert figure is not None
    assert [axes.get_yscale() for axes in figure.axes] == ["linear", scale]
    assert figure.axes[1].get_ylim()[0] <= least


def test_distances_have_a_logarithmic_axis_however_little_they_span(out: Path) -> None:
    write_run(out, "local", 0, [0.2, 0.4], main="distance", higher=False)
    (compared,) = comparisons(collect([out]))
    figure = figures._curves(compared, figures._looks(["local"]))
    assert figure is not None
    assert [axes.get_yscale() for axes in figure.axes] == ["log", "linear"]


def test_a_line_that_was_never_finished_is_left_out_and_a_broken_one_is_said(out: Path) -> None:
    run = write_run(out, "fedavg", 0, [0.5, 0.5], rounds=(1, 2))
    with (run / "metrics.jsonl").open("a") as lines:
        lines.write('{"round": 3, "kind": "eval')
    (compared,) = comparisons(collect([out]))
    figure = figures._curves(compared, figures._looks(["fedavg"]))
    assert figure is not None
    assert list(figure.axes[0].lines[0].get_xdata()) == [1, 2]
    with (run / "metrics.jsonl").open("a") as lines:
        lines.write("\n")
    with pytest.raises(RecordError, match=r"metrics\.jsonl is damaged"):
        figures._curves(compared, figures._looks(["fedavg"]))


def test_curves_end_where_the_first_seed_stopped(out: Path) -> None:
    write_run(out, "fedavg", 0, [0.5, 0.5], rounds=(1, 2, 3))
    write_run(out, "fedavg", 1, [0.5, 0.5], rounds=(1, 2))
    (compared,) = comparisons(collect([out]))
    figure = figures._curves(compared, figures._looks(["fedavg"]))
    assert figure is not None
    assert list(figure.axes[0].lines[0].get_xdata()) == [1, 2]


def test_graphs_lie_beside_the_truth_in_its_order_on_one_scale(out: Path) -> None:
    fill(out)
    (compared,) = comparisons(collect([out]))
    figure = figures._graphs(compared, "cobo")
    assert figure is not None
    first, last, true = (axes.images[0] for axes in panels(figure))
    order = [0, 2, 1, 3]
    off = ~np.eye(4, dtype=bool)
    for image, w in ((first, UNIFORM), (last, W), (true, TRUE / 2)):  # rows of W sum to one, so those of the truth do
        shown = image.get_array()
        np.testing.assert_array_equal(np.ma.getmaskarray(shown), ~off)
        np.testing.assert_allclose(shown.data[off], w[np.ix_(order, order)][off], atol=1e-6)
    assert {image.get_clim() for image in (first, last, true)} == {(0, 0.5)}
    left = panels(figure)[0]
    assert [t.get_text() for t in left.get_yticklabels()] == ["client-0", "client-2", "client-1", "client-3"]
    assert "100 % right peers" in panels(figure)[1].get_title()
    assert "33 % right peers" in left.get_title()  # all alike: one of three, in expectation


def test_weights_that_are_no_shares_keep_their_scale(out: Path) -> None:
    write_run(out, "cobo", 0, [0.5] * 4, graphs={"round-000001": 0.8 * TRUE, "true": TRUE})
    (compared,) = comparisons(collect([out]))
    figure = figures._graphs(compared, "cobo")
    assert figure is not None
    learned, true = (axes.images[0].get_array() for axes in panels(figure))
    assert learned.max() == pytest.approx(0.8)
    assert true.max() == 1


def test_nobody_listens_nothing_to_draw(out: Path) -> None:
    fill(out)
    (compared,) = comparisons(collect([out]))
    assert figures._graphs(compared, "local") is None
    assert figures._graphs(compared, "fedavg") is None  # no graphs were recorded


def test_who_gains_has_the_colour_of_gain(out: Path) -> None:
    fill(out)
    (compared,) = comparisons(collect([out]))
    figure = figures._clients(compared)
    axes = next(a for a in figure.axes if a.get_title().startswith("cobo"))
    assert axes.get_title() == "cobo\n75 % better off"
    alone, own = axes.collections[1:]
    np.testing.assert_allclose(alone.get_offsets()[:, 0], [40, 50, 60, 70])  # seed 0, by the value alone
    np.testing.assert_allclose(own.get_offsets()[:, 0], [60, 60, 50, 80])
    colours = [to_hex(c).upper() for c in own.get_facecolors()]
    assert colours == [figures.GAIN, figures.GAIN, figures.LOSS, figures.GAIN]
    assert not any(a.get_title().startswith("local") for a in figure.axes)


def test_lower_is_a_gain_where_lower_is_better(out: Path) -> None:
    write_run(out, "local", 0, [2.0, 3.0], main="loss", higher=False)
    write_run(out, "cobo", 0, [1.0, 4.0], main="loss", higher=False)
    (compared,) = comparisons(collect([out]))
    own = figures._clients(compared).axes[0].collections[2]
    assert [to_hex(c).upper() for c in own.get_facecolors()] == [figures.GAIN, figures.LOSS]


def test_cost_is_drawn_only_where_it_differs(out: Path) -> None:
    write_run(out, "local", 0, [0.5, 0.5])
    write_run(out, "fedavg", 0, [0.6, 0.6], sent=1000)
    write_run(out, "cobo", 0, [0.7, 0.7], sent=1000)
    (compared,) = comparisons(collect([out]))
    looks = figures._looks(["local", "fedavg", "cobo", "ditto"])
    assert figures._cost(compared, looks) is None
    write_run(out, "ditto", 0, [0.7, 0.7], sent=9000)
    (compared,) = comparisons(collect([out]))
    figure = figures._cost(compared, looks)
    assert figure is not None
    assert figure.axes[0].get_xscale() == "log"
    assert "local (sends none)" in [t.get_text() for t in figure.axes[0].get_legend().get_texts()]


def test_eighteen_algorithms_look_different() -> None:
    looks = figures._looks([f"a{i}" for i in range(18)])
    assert len({(look.colour, look.dash) for look in looks.values()}) == 18


def test_shown_rounds_end_with_the_last() -> None:
    assert figures._spread([3], 4) == [3]
    assert figures._spread([0, 1, 2, 5, 10, 20, 50, 100], 4)[-1] == 100
    picked = figures._spread(list(range(1, 200)), 4)
    assert picked[0] == 1
    assert picked[-1] == 199
    assert len(picked) == 4


def test_figures_that_cannot_be_written_are_said(out: Path) -> None:
    write_run(out, "local", 0, [0.5, 0.5])
    (out / "figures").write_text("")
    with pytest.raises(RecordError, match=r"the figures .* cannot be used"):
        draw(out)


def test_two_experiments_are_not_one_picture(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "fedavg", 0, [0.6, 0.6])
    write_run(tmp_path / "b", "fedavg", 0, [0.6, 0.6], experiment="other")
    with pytest.raises(RecordError, match="holds 2 experiments"):
        draw(tmp_path)


def test_clusters_keep_their_colours_while_most_of_their_members_stay(out: Path) -> None:
    run = write_run(out, "comet", 0, [0.5, 0.6, 0.7, 0.8], groups=[0, 1, 0, 1])
    told = [
        [0, 1, 0, 1],
        [1, 0, 1, 0],
        [1, 0, -1, 0],
        [0, 0, 1, 0],
        [2, 0, 2, 1],
    ]
    lines = [{"round": t, "kind": "training", "extra": {"cluster": c}} for t, c in enumerate(told, 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (compared,) = comparisons(collect([out]))
    figure = figures._clusters(compared, "comet")
    assert figure is not None
    shown = figure.axes[0].images[0].get_array()
    steady = shown.filled(-1)[[0, 2, 1, 3]]  # drawn by true group
    assert steady.T.tolist()[:3] == [[0, 1, 0, 1], [0, 1, 0, 1], [0, 1, -1, 1]]
    assert steady.T.tolist()[3] == [1, 1, 0, 1]
    assert len({*steady.T.tolist()[4]}) == 3
    write_run(out, "local", 0, [0.5, 0.6, 0.7, 0.8])
    (compared,) = comparisons(collect([out]))
    assert figures._clusters(compared, "local") is None


def test_architectures_are_drawn_by_size_where_there_are_several(out: Path) -> None:
    sizes = {"train": [10, 20, 40, 80], "validation": [5] * 4, "test": [20] * 4}
    write_run(out, "comet", 0, [0.5] * 4, sizes=sizes, parameters=[100, 5000, 100, 5000])
    (compared,) = comparisons(collect([out]))
    figure = figures._architectures(compared)
    assert figure is not None
    drawn = [sorted(c.get_offsets()[:, 0].tolist()) for c in figure.axes[0].collections]
    assert drawn == [[10, 40], [20, 80]]
    shutil.rmtree(out / "comet")
    write_run(out, "comet", 0, [0.5] * 4, parameters=[100] * 4)
    assert figures._architectures(comparisons(collect([out]))[0]) is None


def test_bubbles_are_the_training_samples_of_the_record(out: Path) -> None:
    counts = np.array([[5, 0, 4], [0, 9, 1], [16, 0, 0], [1, 1, 1]])
    write_run(out, "comet", 0, [0.5] * 4, labels=counts.tolist())
    write_run(out, "local", 0, [0.5] * 4)
    compared = comparisons(collect([out]))[0]
    assert "holdings.png" in {path.name for path in draw(out)}
    figure = figures._holdings(compared)
    assert figure is not None
    bubbles = figure.axes[0].collections[0]
    places = bubbles.get_offsets().astype(int)
    drawn = np.zeros_like(counts, dtype=float)
    drawn[places[:, 0], places[:, 1]] = bubbles.get_sizes()
    np.testing.assert_allclose(drawn / drawn.max(), counts / counts.max())  # areas
    shutil.rmtree(out / "comet")
    write_run(out, "comet", 0, [0.5] * 4, labels=None)  # a regression, or real sites
    assert figures._holdings(comparisons(collect([out]))[0]) is None
    shutil.rmtree(out / "comet")
    write_run(out, "comet", 0, [0.5] * 4, labels=[[1] * 101] * 40)
    assert figures._holdings(comparisons(collect([out]))[0]) is None


def test_bubbles_of_relabelled_clients_tell_the_images_own_classes(out: Path) -> None:
    told = {"labels": [[7, 1], [2, 6]], "relabel": [[0, 1], [1, 0]], "groups": [0, 1]}
    write_run(out, "comet", 0, [0.5] * 2, **told)
    figure = figures._holdings(comparisons(collect([out]))[0])
    assert figure is not None
    texts = {text.get_position(): text.get_text() for text in figure.axes[0].texts if text.get_text().isdigit()}
    assert texts == {(0, 0): "0", (1, 1): "0", (1, 0): "1"}  # one image of class 1 at the first is too few to say
