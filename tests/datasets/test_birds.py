"""Reading birds and scenes: from zip files, folders, the original CUB, and damaged files."""

import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from sightline.datasets.birds import read_birds, read_scenes
from sightline.datasets.data import Build, build
from sightline.datasets.recipes import Backgrounds
from sightline.errors import UserError
from tests.datasets.miniature import SCENES, contents


def pack(cub: Path, scenes: Path, folder: Path) -> None:
    """The small birds and scenes as cub224/ and scenes/, with the columns of Waterbirds' label file."""
    lines = ["id,path,split,x,y,w,h,waterbird,wb_split,wb_place"]
    for bird in read_birds(cub).all:
        for source, target in ((bird.photo, f"images/{bird.name}.png"), (bird.mask, f"masks/{bird.name}.png")):
            (folder / "cub224" / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(cub / "CUB_200_2011" / source, folder / "cub224" / target)
        left, top, right, bottom = bird.box
        where = f"{left},{top},{right - left},{bottom - top}"
        split = 2 if bird.in_test else bird.id % 5 == 1
        lines.append(
            f"{bird.id},images/{bird.name}.png,{'test' if bird.in_test else 'train'},{where},"
            f"{int(bird.waterbird)},{int(split)},{bird.id % 2}"
        )
    (folder / "cub224/cub.csv").write_text("\n".join(lines) + "\n")
    shutil.copytree(scenes, folder / "scenes")
    listed = [f"{kind}/{p.name},{kind}" for kind in SCENES for p in (scenes / kind).iterdir()]
    (folder / "scenes/scenes.csv").write_text("path,class\n" + "\n".join(listed) + "\n")


def zipped(folder: Path, target: Path) -> None:
    with zipfile.ZipFile(target, "w") as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                archive.write(path, path.relative_to(folder).as_posix())


def test_zip_files_and_folders_give_the_same_dataset(cub, scenes, tmp_path):
    packs, zips = tmp_path / "packs", tmp_path / "zips"
    zips.mkdir()
    pack(cub, scenes, packs)
    for name, file in (("cub224", "cub224.zip"), ("scenes", "scenes.zip")):
        zipped(packs / name, zips / file)
    sources = {
        "unpacked": (packs, packs),
        "exact": (packs / "cub224", packs / "scenes"),
        "zips": (zips, zips),
        "files": (zips / "cub224.zip", zips / "scenes.zip"),
    }
    built = [
        contents(build("waterbirds", Build(birds, tmp_path / "made" / name, backgrounds, workers=1, limit=8)).folder)
        for name, (birds, backgrounds) in sources.items()
    ]
    assert all(files == built[0] for files in built)
    assert {bird.background for bird in read_birds(zips).all} == {"land", "water"}


def test_scene_folders_may_be_nested_and_several_make_one_background(tmp_path):
    for folder in ("b/bamboo_forest", "f/forest/broadleaf", "o/ocean", "l/lake/natural"):
        (tmp_path / folder).mkdir(parents=True)
        for i in range(10):
            (tmp_path / folder / f"{i}.jpg").touch()
    scenes = read_scenes(tmp_path)
    assert scenes.folders_named("forest") == ["f/forest/broadleaf"]
    assert scenes.folders_named("lake/natural") == ["l/lake/natural"]
    backgrounds = Backgrounds(scenes, 0, {"land": ("bamboo_forest", "forest/broadleaf"), "water": ("ocean", "lake")})
    pool = backgrounds.pools["land", "test"]
    assert len(pool) == 8
    assert {path.rsplit("/", 1)[0] for path in pool} == {"b/bamboo_forest", "f/forest/broadleaf"}


def test_a_folder_without_birds_or_scenes_is_an_error_that_says_what_was_expected(cub, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match=r"no birds found; expected cub224\.zip, cub\.csv, or CUB_200_2011"):
        read_birds(empty)
    with pytest.raises(UserError, match="no scenes found; expected"):
        read_scenes(empty)
    (empty / "cub224.zip").write_bytes(b"not a zip")
    with pytest.raises(UserError, match=r"cub224\.zip: cannot be read"):
        read_birds(empty)
    (empty / "cub224.zip").unlink()
    (empty / "cub.csv").write_text("id,path\n1,a\n")
    with pytest.raises(UserError, match=r"cub\.csv:1: missing columns: split, x, y, w, h"):
        read_birds(empty)
    (empty / "cub.csv").write_text("id,path,split,x,y,w,h\n1,images/a/b.jpg,train,0,0,1,one\n")
    with pytest.raises(UserError, match=r"cub\.csv:2: not a valid row"):
        read_birds(empty)
    (empty / "cub.csv").write_text("id,path,split,x,y,w,h\n")
    with pytest.raises(UserError, match="the list of birds is empty"):
        read_birds(empty)


def test_errors_about_damaged_files_name_the_file(cub, options, tmp_path):
    broken = shutil.copytree(cub, tmp_path / "broken")
    root = broken / "CUB_200_2011"
    photo = root / read_birds(broken).all[0].photo
    whole = photo.read_bytes()
    photo.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=f"{photo.name}: damaged image"):
        build("waterbirds", replace(options, cub=broken, out=tmp_path / "one"))
    photo.write_bytes(whole)
    mask = broken / "segmentations" / photo.relative_to(root / "images")
    Image.new("L", (3, 3), 255).save(mask)
    with pytest.raises(UserError, match=f"{mask.name}: the mask has"):
        build("waterbirds", replace(options, cub=broken, out=tmp_path / "two"))
    mask.unlink()
    with pytest.raises(UserError, match=f"{mask.name}: no such file; the segmentations are incomplete"):
        read_birds(broken)
    (root / "images.txt").write_text("two b.png\n")
    with pytest.raises(UserError, match=r"images\.txt:1: expected a new number and a name"):
        read_birds(broken)


def test_too_few_scenes_for_disjoint_splits_are_an_error(tmp_path):
    for kind in ("forest", "sea"):
        (tmp_path / kind).mkdir()
        for i in range(6):
            (tmp_path / kind / f"{i}.jpg").touch()
    with pytest.raises(UserError, match="6 scenes are too few, none is left for val"):
        Backgrounds(read_scenes(tmp_path), 0, {"land": ("forest",), "water": ("sea",)})


@pytest.mark.parametrize("path", ["images/../../../outside.jpg", "images//outside.jpg", "images/..\\outside.jpg"])
def test_birds_whose_files_would_be_outside_the_folder_are_refused(tmp_path, path):
    (tmp_path / "birds").mkdir()
    table = f"id,path,split,x,y,w,h\n1,{path},train,0,0,9,9\n"
    (tmp_path / "birds" / "cub.csv").write_text(table)
    if "//" in path:  # the same as a single slash
        assert len(read_birds(tmp_path / "birds").all) == 1
        return
    with pytest.raises(UserError, match=r"bird 1 is called '.*outside', outside its folder"):
        read_birds(tmp_path / "birds")
