"""RSNA Pneumonia Detection Challenge (Shih et al., Radiology: Artificial Intelligence 2019); its images are NIH's."""

from __future__ import annotations

from data_prep.public.release_tables import BOX, PublicTables, ReleaseFolder, with_numbers
from data_prep.sources.source_tables import read_form, read_table, require
from data_prep.sources.spellings import plain_image

FINDING = "Pneumonia"
SIDE = 1024
_NUMBERS = ("x", "y", "width", "height", "Target")


def read(folder: ReleaseFolder) -> PublicTables:
    """stage_2_train_labels.csv, and for patients pneumonia-challenge-dataset-mappings_2018.json."""
    file = folder.table("stage_2_train_labels.csv")
    table = with_numbers(read_table(file, ("patientId", *_NUMBERS)), _NUMBERS, file)
    table = table.rename(columns={"patientId": "image", "width": "w", "height": "h"})
    is_right = (table["Target"] == 1) | ((table["Target"] == 0) & table["x"].isna())
    require(table["Target"], is_right, "1, or 0 without a box", file)
    images = table.groupby("image", sort=False)["Target"].max().rename(FINDING).reset_index()
    choices = [
        f"labels: Target 1 counts as {FINDING}, Target 0 as its absence (choices); Target 0 includes images with other "
        "abnormalities"
    ]
    mapping = folder.optional("pneumonia-challenge-dataset-mappings_2018.json")
    left_out = {}
    if mapping is None:
        choices.append(
            "patients: patientId names an image; pneumonia-challenge-dataset-mappings_2018.json has patients"
        )
    else:
        # The name of NIH's image begins with its patient: 00000013_005.png.
        patients = read_form(
            mapping,
            "a list of subset_img_id and img_id",
            lambda rows: {
                plain_image(row["subset_img_id"]): str(int(row["img_id"].split("_")[0])) for row in rows
            },
        )
        found = images["image"].map(plain_image).map(patients)
        images["patient"] = found.fillna(images["image"])
        unknown = images.loc[found.isna(), "image"]
        left_out = dict.fromkeys(unknown, f"its patient is not in {mapping.name}")
    drawn = table[table["Target"] == 1].assign(category=FINDING, reader="")
    return PublicTables(
        title="RSNA pneumonia",
        images=images,
        boxes=drawn.assign(image_width=SIDE, image_height=SIDE)[BOX],
        choices=choices,
        left_out=left_out,
        images_of=("NIH ChestX-ray14",),
    )
