"""Small versions of every published layout."""

import io
import json
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image

from sightline.data.rows import SPLITS, Rows
from sightline.datasets.cub import WATERBIRDS
from sightline.datasets.imagenet import (
    IMAGENET9_CLASSES,
    IMAGENET9_RANGES,
)
from sightline.datasets.metashift import (
    ANIMALS,
)


def encode_image() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), "teal").save(file, "PNG")
    return file.getvalue()


IMAGE = encode_image()


def put(root: Path, *paths: str, content: bytes | str = IMAGE) -> None:
    for path in paths:
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)


def counted(rows: Rows, *columns: str) -> dict:
    """The number of rows of each (split, class or group)."""
    names = {"label": (rows.labels, rows.classes), "group": (rows.groups, rows.group_names)}
    values = [[SPLITS[split] for split in rows.splits]]
    values += [[names[column][1][number] for number in names[column][0]] for column in columns]
    return dict(Counter(zip(*values, strict=True)))


BIRDS = {  # id: name, class, in the training split
    3: ("001.Black_footed_Albatross/a.jpg", 1, 1),
    5: ("001.Black_footed_Albatross/b.jpg", 1, 0),
    8: ("021.Eastern_Towhee/c.jpg", 21, 1),
    9: ("021.Eastern_Towhee/d.jpg", 21, 0),
}


def make_cub(root: Path) -> None:
    lines = {
        "images.txt": [f"{key} {name}" for key, (name, _, _) in BIRDS.items()],
        "image_class_labels.txt": [f"{key} {label}" for key, (_, label, _) in BIRDS.items()],
        "train_test_split.txt": [f"{key} {in_train}" for key, (_, _, in_train) in BIRDS.items()],
        "bounding_boxes.txt": [f"{key} {key}.0 1.0 4.0 5.5" for key in reversed(BIRDS)],
        "parts/parts.txt": ["1 back", "11 right eye"],
        "parts/part_locs.txt": [f"{key} {part} {key}.5 {part}.0 {part % 2}" for key in BIRDS for part in (1, 11)],
    }
    for path, text in lines.items():
        put(root, path, content="\n".join(text) + "\n")
    for name, _, _ in BIRDS.values():
        put(root, f"images/{name}", f"segmentations/{name[:-4]}.png")


def make_waterbirds(root: Path) -> None:
    columns = {5: (1, 0, 2), 3: (1, 1, 0), 8: (1, 1, 0), 9: (0, 1, 1)}  # y, place (background), split
    lines = ["img_id,img_filename,y,split,place,place_filename"]
    lines += [f"{key},{BIRDS[key][0]},{y},{split},{place},/o/ocean/1.jpg" for key, (y, place, split) in columns.items()]
    put(root, "metadata.csv", content="\n".join(lines))
    put(root, *(name for name, _, _ in BIRDS.values()))


def make_waterbirds_in_cub(root: Path) -> None:
    make_cub(root)
    make_waterbirds(root / WATERBIRDS)


def make_celeba(root: Path) -> None:
    people = {"1.jpg": (1, -1, 0), "2.jpg": (-1, 1, 0), "3.jpg": (1, 1, 1), "4.jpg": (-1, -1, 2)}
    attributes = [f"{name},1,{blond},{male}" for name, (blond, male, _) in people.items()]
    put(root, "list_attr_celeba.csv", content="\n".join(["image_id,Bald,Blond_Hair,Male", *attributes]))
    partition = [f"{name},{split}" for name, (_, _, split) in people.items()]
    put(root, "list_eval_partition.csv", content="\n".join(["image_id,partition", *partition]))
    put(root, *(f"img_align_celeba/{name}" for name in people))


def make_metashift_disc(root: Path) -> None:
    for path in ("train/cat/cat(sofa)", "train/cat/cat(bed)", "train/dog/dog(bench)", "train/dog/dog(bike)"):
        put(root, f"{path}/1.jpg", f"{path}/2.jpg")
    put(root, "test/cat/cat(shelf)/3.jpg", "test/dog/dog(shelf)/4.jpg", "train/dog/dog(boat)/5.jpg")


def make_metashift_indoor_outdoor(root: Path) -> None:
    for path in ("train/cat/cat(indoor)", "train/dog/dog(outdoor)", "test/cat/cat(outdoor)", "test/dog/dog(indoor)"):
        put(root, f"{path}/{len(path)}.jpg")


def animal_subsets() -> dict[str, list[str]]:
    """Three large contexts for each animal, one that is too small, and a context of an animal that is not used."""
    subsets = {}
    for number, animal in enumerate(ANIMALS):
        for index, context in enumerate(("grass", "water", "fence")):
            subsets[f"{animal}({context})"] = [f"{number}{index}{image:02}" for image in range(30)]
        subsets[f"{animal}(hat)"] = [f"{number}9{image:02}" for image in range(24)]
    for context in ("grass", "water", "fence"):  # one image that is in all contexts of the bear
        subsets[f"bear({context})"].append("shared")
    return subsets | {"cat(sofa)": ["1"] * 40}


def make_metashift_animals(root: Path) -> None:
    subsets = animal_subsets()
    put(root, "full-candidate-subsets.json", content=json.dumps(subsets))
    put(root, *{f"images/{image}.jpg" for name in subsets if "cat" not in name for image in subsets[name]})


def make_spawrious(root: Path, count: int = 10) -> None:
    for half in "01":
        for background in ("desert", "jungle", "dirt", "mountain", "snow", "beach"):
            for breed in ("bulldog", "corgi", "dachshund", "labrador"):
                put(root, *(f"{half}/{background}/{breed}/{n:03}.png" for n in range(count)), content=b"")


def make_siim_prepared(root: Path) -> None:
    put(root, "train_set/0/a.dcm", "train_set/1/b.dcm", "train_set/1/c.dcm")
    put(root, "full_test_set/0/d.dcm", "full_test_set/0/e.dcm", "full_test_set/1/f.dcm", "full_test_set/1/g.dcm")
    put(root, "robust_test_set/0/d.dcm", "robust_test_set/1/f.dcm")
    put(root, "non_robust_test_set/0/e.dcm", "non_robust_test_set/1/g.dcm")
    put(root, "all_masks/a.png", "all_masks/f.png")


def make_siim_kaggle(root: Path) -> None:
    lines = ["ImageId, EncodedPixels", "a, -1", "b, 1 2 2 1", "b, 9 1", "c, 0 3", "d, -1", "e,-1"]
    put(root, "train-rle.csv", content="\n".join(lines))
    put(root, *(f"dicom-images-train/{name}1/{name}2/{name}.dcm" for name in "abcdex"))
    put(root, "cxr_tube_dict.json", content='{"c": false, "d": true, "elsewhere": true}')


def make_imagenet(root: Path) -> None:
    put(root, "train/n01440764/n01440764_1.JPEG", "train/n15075141/n15075141_1.JPEG")
    put(root, "val/n01440764/ILSVRC2012_val_00000002.JPEG", "val/n02012849/ILSVRC2012_val_00000001.JPEG")
    box = "<bndbox><xmin>{}</xmin><ymin>2</ymin><xmax>6</xmax><ymax>7.5</ymax></bndbox>"
    objects = "".join(f"<object><name>n01440764</name>{box.format(left)}</object>" for left in (1, 3))
    put(root, "Annotations/CLS-LOC/val/ILSVRC2012_val_00000002.xml", content=f"<annotation>{objects}</annotation>")


def make_imagenet9(root: Path) -> None:
    for variant in ("original", "mixed_same", "mixed_rand"):
        for number, name in enumerate(IMAGENET9_CLASSES):
            put(root, f"{variant}/val/{number:02}_{name}/{variant}.JPEG")


def make_imagenet_v2(root: Path) -> None:
    put(root, "0/a.jpeg", "10/b.jpeg", "9/c.jpeg", "999/d.jpeg", "999/e.jpeg")


def make_wnids(root: Path) -> None:
    put(root, "n15075141/a.jpg", "n01440764/b.jpg", "README.txt")


def make_imagenet_s(root: Path) -> None:
    put(root, "train-semi/n01440764/a.JPEG", "validation/n01440764/b.JPEG", "test/n01440764/c.JPEG")
    numbers = np.zeros((8, 8, 3), np.uint8)
    numbers[2, :, 0] = 5  # class 5
    numbers[3, :, 1] = 1  # class 256
    numbers[4] = (1000 % 256, 1000 // 256, 0)  # to be ignored
    file = io.BytesIO()
    Image.fromarray(numbers).save(file, "PNG")
    for path in ("train-semi-segmentation/n01440764/a.png", "validation-segmentation/n01440764/b.png"):
        put(root, path, content=file.getvalue())


def make_imagenet_segmentation(root: Path) -> None:
    for name in ("n01440764/a", "n02012849/b", "n00007846/c"):  # the last is a person: no class of the 1,000
        put(root, f"images/{name}.png", f"masks/{name}.png")


def make_objectnet(root: Path) -> None:
    titles = ["tench, Tinca tinca", "analog clock", "digital clock", "backpack"]
    put(root, "mappings/imagenet_to_label_2012_v2", content="\n".join(titles) + "\n")
    files = {
        "folder_to_objectnet_label": {"alarm_clock": "Alarm clock", "backpack": "Backpack", "air_freshener": "Air"},
        "objectnet_to_imagenet_1k": {"Alarm clock": "digital clock; analog clock", "Backpack": "backpack"},
        "pytorch_to_imagenet_2012_id": {"0": 0, "409": 1, "530": 2, "414": 3},
    }
    for name, content in files.items():
        put(root, f"mappings/{name}.json", content=json.dumps(content))
    put(
        root, "images/alarm_clock/a.png", "images/backpack/b.png", "images/backpack/c.png", "images/air_freshener/d.png"
    )


def make_si_score(root: Path) -> None:
    put(root, "ambulance/1.jpg", "polar bear/2.jpg", "pitcher (container)/3.jpg")
    put(root, "foreground_classes.csv", content="int,label\n407,ambulance\n")


def released_map() -> dict[str, int]:
    nine = {str(label): -1 for label in range(1000)}
    for name, ranges in IMAGENET9_RANGES.items():
        for first, last in ranges:
            nine |= {str(label): IMAGENET9_CLASSES.index(name) for label in range(first, last + 1)}
    return nine | {"407": 2, "402": 6}
