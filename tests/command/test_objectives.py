"""Every objective by the command line: composition of its configuration, two steps of training, messages."""

from __future__ import annotations

import pandas as pd
import pytest
import yaml

from medclip_dcl.command.cli import main
from medclip_dcl.common.parts import part_config
from medclip_dcl.models.image_text import ImageTextModel
from tests.command.small_runs import ROOT, refused, small

OBJECTIVES = sorted((ROOT / "configs/objective").glob("*.yaml"))
FAST = ("biovil", "dcl_known_class", "ranked_by_text", "soft_targets")
"""An encoder, a correction, a rule of weights and a loss; each part has its own tests. The others are slow."""
PARAMETERS = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem not in FAST))
    for path in OBJECTIVES
]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda path: path.stem)
def test_every_objective_replaces_that_of_the_configuration_below(objective):
    said = yaml.safe_load(objective.read_text())["model"]["init_args"]
    assert {"loss", "class_probability", "negative_weights"} <= said.keys()


def test_an_objective_composes_with_mimic_cxr(capsys):
    objective = ROOT / "configs/objective/dcl_lm.yaml"
    arguments = ["--config", str(ROOT / "configs/mimic_cxr.yaml"), "--config", str(objective)]
    with pytest.raises(SystemExit) as error:
        main(["fit", *arguments, "--run_folder", "runs/x", "--print_config"])
    assert error.value.code in (0, None)
    config = yaml.safe_load(capsys.readouterr().out)
    said = yaml.safe_load(objective.read_text())["model"]["init_args"]
    assert_holds(config["model"]["init_args"], said)
    assert config["run_folder"] == "runs/x"


def assert_holds(found, wanted) -> None:
    """Everything that the one says, the other says."""
    for key, value in wanted.items():
        if isinstance(value, dict):
            assert_holds(found[key], value)
        else:
            assert found[key] == value, key


@pytest.mark.parametrize("objective", PARAMETERS)
def test_every_objective_trains_two_steps(objective, embedded_set, small_bert, tmp_path, caplog):
    run = tmp_path / "run"
    options = ["--trainer.max_steps", "2", "--trainer.limit_val_batches", "0", "--trainer.callbacks", "[]"]
    of_its_own = objective.stem == "biovil"  # its file names the image encoder
    options += ["--model.init_args.image_encoder.init_args.width", "8"] * of_its_own
    words = small(run, embedded_set, small_bert, *options, objective=objective.stem, resnet=of_its_own)
    with caplog.at_level("INFO"):
        main(["fit", *words])
    if of_its_own:
        assert "negatives: image_to_text 0.5, masked_language_weight 1.0" in caplog.text
    metrics = pd.read_csv(run / "metrics.csv")
    losses = metrics["train/loss"].dropna()
    assert len(losses) == 2 and losses.between(1e-3, 30).all()
    wanted = yaml.safe_load(objective.read_text())["model"]["init_args"]
    assert_holds(yaml.safe_load((run / "config.yaml").read_text())["model"]["init_args"], wanted)
    rule = wanted.get("negative_weights")
    weights = metrics["train/weight"].dropna()
    assert len(weights) == 2 and (rule is not None or (weights == 1).all())
    assert ("train/masked_language_loss" in metrics) == ("masked_language_weight" in wanted)
    model = ImageTextModel.load_from_checkpoint(run / "checkpoints/last.ckpt")
    for name in ("negative_weights", "loss", "near_texts"):
        part, config = getattr(model.objective, name), wanted.get(name)
        assert (part is None) == (config is None)
        if part is not None:
            said = {key: value for key, value in config.get("init_args", {}).items() if value is not None}
            assert_holds(part_config(part)["init_args"], said)  # null is filled in before training
            assert part_config(part)["class_path"].endswith(config["class_path"].rpartition(".")[2])
    assert model.objective.image_to_text == wanted.get("image_to_text", 0.1)


MISSING: list[tuple[str, list[str], str]] = [
    ("remove_text", [], "has no sentence embeddings; create embeddings with: medclip-dcl embed"),
    ("infonce", ["--model.init_args.masked_language_weight", "1"], "masked_language_head: true"),
    ("infonce", ["--data.init_args.contrastive_batch", "12"], "must be a multiple of data.batch_size 8"),
]


@pytest.mark.parametrize(("objective", "options", "message"), MISSING)
def test_missing_inputs_are_reported_before_training(
    objective, options, message, small_set, small_bert, tmp_path, capsys
):
    words = ["fit", *small(tmp_path / "run", small_set, small_bert, *options, objective=objective)]
    assert message in refused(capsys, words)
    assert not (tmp_path / "run/metrics.csv").exists()


@pytest.mark.slow
def test_a_laptop_trains_without_downloads(small_set, small_bert, tmp_path):
    arguments = [
        item
        for name in ("mimic_cxr", "laptop", "text_encoder_small")
        for item in ("--config", f"{ROOT}/configs/{name}.yaml")
    ]
    run = tmp_path / "run"
    main(
        [
            "fit", *arguments, "--run_folder", str(run),
            "--data.init_args.folder", str(small_set),
            "--model.init_args.text_encoder.init_args.pretrained", str(small_bert),
            "--trainer.max_steps", "1", "--trainer.limit_val_batches", "1",
        ]
    )  # fmt: skip
    config = yaml.safe_load((run / "config.yaml").read_text())
    encoder = config["model"]["init_args"]["image_encoder"]
    assert encoder["init_args"]["weights"] is None and encoder["init_args"]["stride"] == 16
    assert config["data"]["init_args"]["num_workers"] == 0 and (run / "checkpoints/best.ckpt").is_file()


def test_the_constant_of_known_class_composes(tmp_path, capsys):
    """The configuration of docs/objectives.md, behind the objective: drawn images stay, eta is one number."""
    page = (ROOT / "docs/objectives.md").read_text(encoding="utf-8")
    constant = tmp_path / "constant.yaml"
    constant.write_text(page.partition("```yaml\n")[2].partition("```")[0])
    files = (
        f"{ROOT}/configs/mimic_cxr.yaml",
        f"{ROOT}/configs/objective/dcl_known_class.yaml",
        str(constant),
    )
    arguments = [word for file in files for word in ("--config", file)]
    with pytest.raises(SystemExit):
        main(["fit", *arguments, "--run_folder", "runs/x", "--print_config"])
    options = yaml.safe_load(capsys.readouterr().out)["model"]["init_args"]
    assert (options["correction_images"], options["correction_count"]) == ("class", 8)
    eta = options["class_probability"]
    assert eta["class_path"].endswith("ConstantClassProbability")
    assert eta["init_args"] == {"eta": 0.413, "max_eta": 0.8}
