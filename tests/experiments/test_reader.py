import tomllib
from pathlib import Path

import pytest

from coterie.errors import CoterieError, DataError, SettingError
from coterie.experiments import reader, toml

FILE = """
about = "A test."
[population]
data = "digits"
partition = { name = "iid", clients = 3 }
model = { name = "linear", inputs = 64, outputs = 10 }
[run]
rounds = 4
[plan]
steps = 2
lr = 0.5
[algorithms.local]
[algorithms.fedavg]
server_lr = 0.5
plan = { epochs = 3, lr = 0.25 }
[scales.smoke]
"run.rounds" = 2
run.evaluate_every = 1
"population.partition" = { name = "iid", clients = 2 }
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    return path


def test_a_file_is_read_and_the_shared_plan_goes_beneath_an_own_one(file: Path):
    e = reader.read(str(file))
    assert (e.name, e.scale, e.budget.rounds, e.budget.seeds) == ("mine", "paper", 4, (0, 1, 2))
    local, fedavg = e.algorithm("local"), e.algorithm("fedavg")
    assert (local.plan.steps, local.plan.epochs, local.plan.lr, local.plan.rounds) == (2, None, 0.5, 4)
    assert (fedavg.plan.steps, fedavg.plan.epochs, fedavg.plan.lr, fedavg.server_lr) == (None, 3, 0.25, 0.5)
    population = e.population(0)
    assert (population.n, population.task.classes) == (3, 10)


def test_later_changes_win(file: Path, tmp_path: Path):
    tuned = tmp_path / "tuned.toml"
    tuned.write_text('[tuned]\n"algorithms.fedavg.server_lr" = 0.1\n"algorithms.oracle.weighted" = false\n')
    e = reader.read(str(file), scale="smoke", tuned=tuned, seeds=[5], sets=["run.rounds=9", "local.plan.lr=1"])
    assert (e.scale, e.budget.rounds, e.budget.evaluate_every, e.budget.seeds) == ("smoke", 9, 1, (5,))
    assert e.population(5).n == 2
    assert e.algorithm("fedavg").server_lr == 0.1
    assert e.algorithm("local").plan.lr == 1.0


def test_any_algorithm_can_be_asked_for_and_takes_the_shared_plan(file: Path):
    e = reader.read(str(file), algorithms=["oracle", "local"])
    assert e.algorithms == ["oracle", "local"]
    assert e.algorithm("oracle", (0, 0, 1)).plan.steps == 2


@pytest.mark.parametrize("name", reader.names())
def test_what_is_shown_is_the_same_experiment(name: str, tmp_path: Path):
    for scale in (None, "smoke"):
        e = reader.read(name, scale=scale)
        again = tmp_path / f"{name}.toml"
        again.write_text(toml.dump(reader.plain(e)))
        twin = reader.read(str(again))
        assert (twin.name, twin.scale, twin.budget, twin.attendance) == (e.name, e.scale, e.budget, e.attendance)
        assert [twin.algorithm(a) for a in twin.algorithms] == [e.algorithm(a) for a in e.algorithms]
        assert twin.given["population"] == e.given["population"]


def test_toml_of_any_plain_value_reads_back():
    value = {"a": [1, 2.5, True], "b c": 'x "y"\n', "t": {"u": {"v": 1e-300, "w": {}}, "x": {"y": [[], ["é"]]}}}
    assert tomllib.loads(toml.dump(value)) == value


WRONG = {
    'nmae = "x"': "there is no key 'nmae': did you mean name?",
    "name = 3": "name must be text, not 3",
    "[algorithms.fedavgg]": "no algorithm is called 'fedavgg': did you mean fedavg?",
    "[algorithms.oracle]\nweighhted = true": "oracle has no setting 'weighhted': did you mean weighted?",
    "[algorithms.oracle]\nweighted = 3": "oracle.weighted must be true or false, not 3",
    "[algorithms.oracle]\nplan = { lr = -1.0 }": "oracle.plan: the rate lr must be at least 0 and finite, not -1.0",
    "[participation]\nfraction = 2.0": "participation: the share of clients must be above 0 and at most 1, not 2.0",
    "[participation]\nby_size = true": "participation: by_size goes with count",
    "[scales.tiny": "is not TOML",
}


@pytest.mark.parametrize("more", WRONG)
def test_what_is_wrong_is_said_with_file_and_key(file: Path, more: str):
    top = more if not more.startswith("[") else ""
    file.write_text(top + FILE + (more if not top else ""))
    with pytest.raises(SettingError) as caught:
        reader.read(str(file))
    assert WRONG[more] in str(caught.value)
    assert str(file) in str(caught.value)


CHANGES = {
    "run.rouns=3": "run has no setting 'rouns': did you mean rounds?",
    "run.rounds=0": "rounds must be a whole number of at least 1, not 0",
    "run.rounds=many": "run.rounds must be a whole number, not 'many'",
    "run.seeds=[1, 1]": "seeds must be different",
    "rnu.rounds=3": "there is no 'rnu' to set: did you mean run?",
    "fedavvg.server_lr=3": "there is no 'fedavvg' to set: did you mean fedavg?",
    "algorithms.oracle.weighted=true": "'oracle' is not among the algorithms",
    "run.rounds.x=3": "run.rounds is 4, no table that could hold 'x'",
    "run.rounds": "--set takes path=value",
    "plan.steps=0.5": "plan.steps must be a whole number, not 0.5",
}


@pytest.mark.parametrize("change", CHANGES)
def test_wrong_changes_are_refused(file: Path, change: str):
    with pytest.raises(SettingError) as caught:
        reader.read(str(file), sets=[change])
    assert CHANGES[change] in str(caught.value)


PEOPLE = {
    "population.data=digit": "'digits'",
    "population.kind=delt": "did you mean dealt?",
    "population.partition.clents=4": "partition iid has no setting 'clents': did you mean clients?",
    "population.partition=ird": "did you mean iid?",
    "population.partition.clients=0": "clients must be a whole number of at least 1",
    "population.model.name=linaer": "did you mean linear?",
    "population.model.inputs=wide": "population",
    "population.model.inputs=63": "its model cannot take samples of shape (1, 8, 8)",
    "population.task=classifcation": "did you mean classification?",
    "population.augment.flop=true": "population.augment has no setting 'flop': did you mean flip?",
    "population.moodel=linear": "did you mean model?",
}


@pytest.mark.parametrize("change", PEOPLE)
def test_a_population_that_cannot_be_made_is_refused(file: Path, change: str):
    with pytest.raises(CoterieError) as caught:
        reader.read(str(file), sets=[change]).population(0)
    assert PEOPLE[change] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_and_files_that_are_not_there(file: Path, tmp_path: Path):
    with pytest.raises(SettingError, match="did you mean quickstart"):
        reader.read("quikstart")
    with pytest.raises(SettingError, match="cannot be read"):
        reader.read(str(tmp_path / "none.toml"))
    with pytest.raises(SettingError, match="no scale is called 'smoek': did you mean smoke"):
        reader.read(str(file), scale="smoek")
    with pytest.raises(SettingError, match="did you mean local"):
        reader.read(str(file), algorithms=["lokal"])
    wrong = tmp_path / "tuned.toml"
    wrong.write_text('[tuned]\n"plan.lr" = 1\n')
    with pytest.raises(SettingError, match=r"algorithms\.NAME\.SETTING"):
        reader.read(str(file), tuned=wrong)


def test_models_go_round_among_the_clients(file: Path):
    change = 'population.model=[{name="linear",inputs=64,outputs=10},{name="mlp",sizes=[64,8,10]}]'
    population = reader.read(str(file), sets=[change]).population(0)
    assert population.architecture == (0, 1, 0)


def test_missing_data_say_how_to_get_them(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path / "empty"))
    with pytest.raises(DataError, match="coterie data get mnist"):
        reader.read(str(file), sets=["population.data=mnist"]).population(0)


def test_a_plan_set_for_all_wins_over_what_the_file_says_of_one(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        '[population]\ndata = "digits"\npartition = { name = "iid", clients = 2 }\n'
        'model = { name = "linear", inputs = 64, outputs = 10 }\n[run]\nrounds = 2\n[plan]\nsteps = 1\n'
        "[algorithms.local]\nplan.lr = 0.5\nplan.batch = 4\n[algorithms.fedavg]\n"
    )
    plans = {
        name: reader.read(str(file), sets=sets).algorithm("local", None).plan.lr  # type: ignore[attr-defined]
        for name, sets in {"file": [], "set": ["plan.lr=0.1"], "own": ["plan.lr=0.1", "local.plan.lr=0.7"]}.items()
    }
    assert plans == {"file": 0.5, "set": 0.1, "own": 0.7}
    assert reader.read(str(file), sets=["plan.lr=0.1"]).algorithm("local", None).plan.batch == 4  # type: ignore[attr-defined]
