"""Data that stay where they are: read and checked against what is declared, or one sentence that says what is wrong."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from coterie.data.holding import Found, Schema, read
from coterie.errors import DataError, SettingError

TABLE = Schema(columns=("age", "bmi"), target="ill", classes=("no", "yes"))
ROWS = ["age,bmi,ill", "50,21.5,no", "61,30,yes", "44,25,yes", "70,28,no"]


def table(folder: Path, lines: list[str], schema: Schema = TABLE) -> Found:
    path = folder / "patients.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return read("csv", str(path), schema, "north")


def test_a_table_becomes_columns_in_the_declared_order_and_labels_of_the_declared_map(tmp_path: Path) -> None:
    found = table(tmp_path, ROWS)
    inputs, targets = found.samples["train"]
    assert inputs.tolist() == [[50, 21.5], [61, 30], [44, 25], [70, 28]]
    assert inputs.dtype == torch.float32
    assert targets.tolist() == [0, 1, 1, 0]
    assert found.facts == {"train": 4, "gaps": {}, "training labels": {"no": 2, "yes": 2}}
    turned = Schema(columns=("bmi", "age"), target="ill", classes=("yes", "no"))
    again = table(tmp_path, ["﻿ill; x ;bmi;age", *("; ".join(["no", "7", "21.5", "50"]) for _ in range(2))], turned)
    assert again.samples["train"][0].tolist() == [[21.5, 50]] * 2
    assert again.samples["train"][1].tolist() == [1, 1]


def test_splits_are_the_tables_own_or_shares_that_follow_from_the_name(tmp_path: Path) -> None:
    own = table(tmp_path, ["split," + ROWS[0], *(f"{s},{r}" for s, r in zip(["test", "train", "train", "validation"],
                                                                            ROWS[1:], strict=True))])  # fmt: skip
    assert {s: len(y) for s, (_, y) in own.samples.items()} == {"train": 2, "validation": 1, "test": 1}
    assert own.samples["test"][0].tolist() == [[50, 21.5]]
    shares = Schema(columns=("age", "bmi"), target="ill", classes=("no", "yes"), validation=0.25, test=0.25)
    one, two = (table(tmp_path, ROWS, shares) for _ in range(2))
    assert {s: len(y) for s, (_, y) in one.samples.items()} == {"train": 2, "validation": 1, "test": 1}
    assert all(torch.equal(one.samples[s][0], two.samples[s][0]) for s in one.samples)


def test_gaps_are_refused_or_filled_by_training_rows_as_declared(tmp_path: Path) -> None:
    lines = ["split,age,bmi,ill", "train,10,1,no", "train,,3,yes", "train,20,NA,yes", "test,1000,?,no"]
    with pytest.raises(DataError, match=r"north.*'age' has 1 gaps; the experiment fills none"):
        table(tmp_path, lines)
    filled = table(tmp_path, lines, Schema(columns=("age", "bmi"), target="ill", classes=("no", "yes"), missing="mean"))
    assert filled.samples["train"][0].tolist() == [[10, 1], [15, 3], [20, 2]]
    assert filled.samples["test"][0].tolist() == [[1000, 2]]
    assert filled.facts["gaps"] == {"age": 1, "bmi": 2}
    schema = Schema(columns=("age", "bmi"), target="ill", classes=("no", "yes"), missing="mean", scale="client")
    scaled = table(tmp_path, lines, schema).samples["train"][0]
    torch.testing.assert_close(scaled.mean(0), torch.zeros(2), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ((0, "age,weight,ill"), "there is no column 'bmi'; there are age, weight, ill"),
        ((0, "age,bmi,ill,age"), "two columns 'age'"),
        ((2, "61,thirty,yes"), "row 2, column 'bmi': 'thirty' is no number"),
        ((2, "61,inf,yes"), "row 2, column 'bmi': the value is infinite"),
        ((2, "61,30,maybe"), "row 2, column 'ill': 'maybe' is none of the classes no, yes"),
        ((2, "61,30,"), "row 2, column 'ill': '' is none of the classes"),
        ((2, "61,30"), "row 2 has more or fewer values"),
        ((2, "61,30,5,yes"), "row 2 has more or fewer values"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_in_one_sentence(
    tmp_path: Path, change: tuple[int, str], why: str
) -> None:
    lines = list(ROWS)
    lines[change[0]] = change[1]
    with pytest.raises(DataError) as error:
        table(tmp_path, lines)
    assert why in str(error.value)
    assert str(error.value).startswith("client 'north', ")
    assert "\n" not in str(error.value)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no training samples"):
        table(tmp_path, ROWS[:1])
    with pytest.raises(DataError, match="no column"):
        table(tmp_path, [""])
    with pytest.raises(DataError, match="cannot be read"):
        read("csv", str(tmp_path / "nowhere.csv"), TABLE, "north")
    (tmp_path / "latin.csv").write_bytes("age,bmi,ill\n1,2,größer\n".encode("latin-1"))
    with pytest.raises(DataError, match="cannot be read"):
        read("csv", str(tmp_path / "latin.csv"), TABLE, "north")
    with pytest.raises(SettingError, match="csv, images, tensors, loader"):
        read("excel", "x", TABLE, "north")


def test_values_to_be_learned_need_no_label_map(tmp_path: Path) -> None:
    found = table(tmp_path, ["age,bmi,dose", "50,21,1.5", "60,22,2"], Schema(columns=("age", "bmi"), target="dose"))
    assert found.samples["train"][1].tolist() == [[1.5], [2.0]]
    with pytest.raises(DataError, match="the value to be learned is missing"):
        table(tmp_path, ["age,bmi,dose", "50,21,"], Schema(columns=("age", "bmi"), target="dose"))


# ---- images ----------------------------------------------------------------------------------------------------------

PICTURES = Schema(shape=(3, 4, 5), dtype="uint8", classes=("cat", "dog"))


def picture(path: Path, colour: tuple[int, ...], mode: str = "RGB", size: tuple[int, int] = (5, 4)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour if len(colour) > 1 else colour[0]).save(path)


def test_an_image_folder_has_a_folder_per_class_and_maybe_per_split(tmp_path: Path) -> None:
    for split in ("train", "test"):
        picture(tmp_path / "a" / split / "cat" / "1.png", (1, 2, 3))
        picture(tmp_path / "a" / split / "dog" / "1.png", (9, 9, 9))
    picture(tmp_path / "a" / "train" / "dog" / "grey.png", (7,), "L")
    (tmp_path / "a" / "train" / "dog" / "Thumbs.db").write_bytes(b"x")
    found = read("images", str(tmp_path / "a"), PICTURES, "north")
    inputs, targets = found.samples["train"]
    assert inputs.shape == (3, 3, 4, 5)
    assert targets.tolist() == [0, 1, 1]
    assert inputs[0, :, 0, 0].tolist() == [1, 2, 3]
    assert inputs[2].unique().tolist() == [7]
    assert found.facts["files that are no images"] == 1
    assert len(found.samples["test"][0]) == 2


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda d: picture(d / "cow" / "1.png", (1, 2, 3)), "cow is no folder of a class: cat, dog"),
        (lambda d: picture(d / "cat" / "2.png", (1, 2, 3), size=(6, 4)), "cat/2.png has shape (3, 4, 6)"),
        (lambda d: picture(d / "cat" / "2.png", (3000,), "I;16"), "cat/2.png is I;16"),
        (lambda d: (d / "cat" / "2.png").write_bytes(b"no"), "cat/2.png is no image"),
    ],
)
def test_a_picture_that_does_not_fit_is_refused(tmp_path: Path, spoil, why: str) -> None:
    picture(tmp_path / "cat" / "1.png", (1, 2, 3))
    spoil(tmp_path)
    with pytest.raises(DataError) as error:
        read("images", str(tmp_path), PICTURES, "north")
    assert why in str(error.value)


# ---- tensors and loaders ---------------------------------------------------------------------------------------------

PAIRS = Schema(shape=(2,), classes=("no", "yes"))


def test_tensors_come_from_safetensors_or_npz_alike(tmp_path: Path) -> None:
    x, y = torch.arange(12.0).reshape(6, 2), torch.tensor([0, 1, 0, 1, 0, 1])
    save_file({"inputs": x, "targets": y}, tmp_path / "a.safetensors")
    np.savez(tmp_path / "a.npz", inputs=x.double().numpy(), targets=y.numpy())
    for name in ("a.safetensors", "a.npz"):
        inputs, targets = read("tensors", str(tmp_path / name), PAIRS, "north").samples["train"]
        assert torch.equal(inputs, x)
        assert torch.equal(targets, y)
    save_file({"train/inputs": x, "train/targets": y, "test/inputs": x[:1].clone(), "test/targets": y[:1].clone()},
              tmp_path / "b.safetensors")  # fmt: skip
    assert len(read("tensors", str(tmp_path / "b.safetensors"), PAIRS, "north").samples["test"][0]) == 1


def test_no_pickle_is_ever_opened(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self):
            return Path.touch, (tmp_path / "bang",)

    np.savez(tmp_path / "bad.npz", inputs=np.array([Bomb()], dtype=object), targets=np.zeros(1))
    torch.save({"inputs": Bomb()}, tmp_path / "bad.safetensors")
    (tmp_path / "bang").unlink(missing_ok=True)
    for name in ("bad.npz", "bad.safetensors"):
        with pytest.raises(DataError, match="no safetensors file"):
            read("tensors", str(tmp_path / name), PAIRS, "north")
    assert not (tmp_path / "bang").exists()


@pytest.mark.parametrize(
    ("inputs", "targets", "why"),
    [
        (torch.zeros(4, 3), torch.zeros(4).long(), "shape (3,), and (2,) is declared"),
        (torch.zeros(4, 2), torch.zeros(3).long(), "not one for one"),
        (torch.full((4, 2), torch.nan), torch.zeros(4).long(), "NaN or infinity"),
        (torch.zeros(4, 2).long(), torch.zeros(4).long(), "torch.int64, and float32 is declared"),
        (torch.zeros(4, 2), torch.tensor([0, 1, 2, 0]), "labels must lie in 0 to 1"),
        (torch.zeros(4, 2), torch.zeros(4), "one whole number per sample"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, inputs, targets, why: str) -> None:
    save_file({"inputs": inputs, "targets": targets}, tmp_path / "a.safetensors")
    with pytest.raises(DataError) as error:
        read("tensors", str(tmp_path / "a.safetensors"), PAIRS, "north")
    assert why in str(error.value)


def loaded(folder: Path, body: str, name: str = "load") -> Found:
    (folder / "own.py").write_text(f"import numpy as np\n\n\ndef load(key, schema):\n    {body}\n")
    return read("loader", f"{folder / 'own.py'}:{name}", PAIRS, "north")


def test_an_own_loader_gives_pairs_or_pairs_by_split_and_is_told_who_it_is(tmp_path: Path) -> None:
    found = loaded(tmp_path, "return np.full((4, *schema.sample), float(len(key))), np.zeros(4, dtype=int)")
    assert found.samples["train"][0].unique().tolist() == [5]
    pair = "(np.zeros((4, 2)), np.ones(4, dtype=int))"
    assert set(loaded(tmp_path, f"return {{'train': {pair}, 'test': {pair}}}").samples) == {"train", "test"}


@pytest.mark.parametrize(
    ("body", "name", "why"),
    [
        ("raise RuntimeError('no\\nconnection')", "load", "the loader raised RuntimeError: no"),
        ("return 3", "load", "returns (inputs, targets)"),
        ("return {'train': 3}", "load", "returns (inputs, targets)"),
        ("return {'tran': (np.zeros((4, 2)), np.ones(4, dtype=int))}", "load", "there is no split 'tran'"),
        ("return (['a'], [1])", "load", "no arrays"),
        ("return 3", "fetch", "has no function 'fetch'"),
        ("return (", "load", "cannot be imported: SyntaxError"),
    ],
)
def test_a_loader_that_fails_is_a_sentence(tmp_path: Path, body: str, name: str, why: str) -> None:
    with pytest.raises(DataError) as error:
        loaded(tmp_path, body, name)
    assert why in str(error.value)


def test_a_schema_that_nothing_could_fit_is_refused() -> None:
    for wrong in (
        {},
        {"columns": ("a",), "shape": (3,)},
        {"columns": ("a", "a")},
        {"columns": ("a", "target")},
        {"shape": (0,)},
        {"columns": ("a",), "classes": ("only",)},
        {"shape": (3,), "missing": "mean"},
        {"columns": ("a",), "validation": 0.6, "test": 0.5},
    ):
        with pytest.raises(SettingError):
            Schema(**wrong)  # type: ignore[arg-type]
