"""Initial weights: found in every kind of source, taken over by name, refused with a reason."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import save_file

from medclip_dcl.common.parts import part_config
from medclip_dcl.common.weight_files import read_model
from medclip_dcl.networks.classifier import FindingNetwork
from medclip_dcl.networks.image_encoder import ResNetRegions
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.initial_weights import TakenOver, take_over
from medclip_dcl.networks.similarity import GlobalCosine, LSENonLocal
from medclip_dcl.networks.text_encoder import BertSentences
from tests.model_folders import edited


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def network(small_bert) -> ImageTextNetwork:
    torch.manual_seed(3)
    text = BertSentences(str(small_bert), dim=6)
    image = ResNetRegions(dim=6, stride=16, width=8)
    return ImageTextNetwork(image, text, LSENonLocal(dim=6), 48, (0.1, 0.2, 0.3), (0.4, 0.7, 1.0))


def checkpoint(network, prefix="network.") -> dict:
    state = {f"{prefix}{name}": value for name, value in network.state_dict().items()}
    return {"format_version": 3, "network": network.config(), "state_dict": state, "objective": {}}


def classifier(network, prefix) -> dict:
    """As a classifier's checkpoint: the image encoder and a head."""
    state = {f"{prefix}image_encoder.{k}": x for k, x in network.image_encoder.state_dict().items()}
    state["head.weight"] = torch.zeros(3, 6)
    return {
        "format_version": 3,
        "network": {"kind": "classifier", "image_encoder": part_config(network.image_encoder)},
        "state_dict": state,
    }


def finding_network(encoder=None) -> FindingNetwork:
    return FindingNetwork(ResNetRegions(dim=6, stride=16, width=8) if encoder is None else encoder, ["Edema"])


@pytest.mark.parametrize("kind", ["checkpoint", "exported", "classifier", "bare classifier"])
def test_an_image_encoder_is_found_in_every_source(network, kind, tmp_path):
    if kind == "exported":
        network.save_pretrained(tmp_path / "source")
    else:
        content = checkpoint(network)
        if "classifier" in kind:
            content = classifier(network, "" if "bare" in kind else "network.")
        torch.save(content, tmp_path / "source")
    mine = finding_network()
    found = take_over(mine, tmp_path / "source", ["image_encoder"])
    assert found.source == str(tmp_path / "source")
    assert same(mine.image_encoder.state_dict(), network.image_encoder.state_dict())
    has_normalisation = "classifier" not in kind
    assert (mine.mean.flatten().tolist() == pytest.approx((0.1, 0.2, 0.3))) == has_normalisation
    assert (mine.std.flatten().tolist() == pytest.approx((0.4, 0.7, 1.0))) == has_normalisation


def test_an_encoder_that_differs_is_refused_by_names(source):
    mine = finding_network(ResNetRegions(stride=16, dim=6, projection="mlp", width=8))
    before = copied(mine)
    with pytest.raises(ValueError, match="a.ckpt: .*image_encoder: ") as error:
        take_over(mine, source, ["image_encoder"])
    message = str(error.value)
    assert "missing ['projection.0.weight', 'projection.1.bias'" in message
    assert "unexpected ['projection.bias', 'projection.weight']" in message
    assert message.endswith("set what differs: image_encoder.init_args.projection: linear (configured: mlp)")
    assert same(mine.state_dict(), before)
    with pytest.raises(ValueError, match=r"missing \['backbone.7.0.bn1.bias'"):
        take_over(finding_network(ResNetRegions(dim=6, width=8)), source, ["image_encoder"])
    with pytest.raises(
        ValueError, match=r"set what differs: image_encoder.init_args.width: 8 \(configured: 4\)"
    ):
        take_over(finding_network(ResNetRegions(stride=16, dim=6, width=4)), source, ["image_encoder"])


def build(small_bert, similarity=None, image=None, **text) -> ImageTextNetwork:
    torch.manual_seed(8)
    encoder = ResNetRegions(dim=6, stride=16, width=8) if image is None else image
    similarity = LSENonLocal(dim=6, sharpness=8.0) if similarity is None else similarity
    return ImageTextNetwork(encoder, BertSentences(str(small_bert), **{"dim": 6, **text}), similarity)


def copied(module) -> dict:
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.fixture(scope="module")
def source(network, tmp_path_factory):
    file = tmp_path_factory.mktemp("source") / "a.ckpt"
    torch.save(checkpoint(network), file)
    return file


def test_whole_network_is_taken_differing_settings_are_said(network, small_bert, source):
    mine = build(small_bert, max_tokens=40, dropout=0.3)
    taken_over = take_over(mine, source)
    assert same(mine.state_dict(), network.state_dict())
    assert torch.equal(mine.mean, network.mean) and torch.equal(mine.std, network.std)
    assert taken_over.taken == list(network.state_dict())
    assert taken_over.kept == taken_over.left_out == []
    assert taken_over.settings == [
        "text_encoder.init_args.architecture.attention_probs_dropout_prob: 0.1 (configured: 0.3)",
        "text_encoder.init_args.architecture.hidden_dropout_prob: 0.1 (configured: 0.3)",
        "text_encoder.init_args.max_tokens: 128 (configured: 40)",
        "similarity.init_args.sharpness: 5.0 (configured: 8.0)",
    ]
    assert mine.similarity.sharpness == 8.0
    assert TakenOver(**json.loads(json.dumps(asdict(taken_over)))) == taken_over


def test_a_fixed_gamma_is_the_configured_one(small_bert, source):
    mine = build(small_bert, LSENonLocal(dim=6, gamma2=4.0, learn_gamma=False))
    taken_over = take_over(mine, source)
    assert mine.similarity.gamma2.item() == pytest.approx(4.0) and taken_over.kept == [
        "similarity.log_gamma2"
    ]
    assert not any("gamma2" in line for line in taken_over.settings)


def test_another_similarity_starts_as_configured_and_is_listed(network, small_bert, source):
    mine = build(small_bert, GlobalCosine(gamma2=3.0))
    taken_over = take_over(mine, source)
    assert same(mine.image_encoder.state_dict(), network.image_encoder.state_dict())
    assert same(mine.text_encoder.state_dict(), network.text_encoder.state_dict())
    assert taken_over.kept == ["similarity.log_gamma2"] and mine.similarity.gamma2.item() == pytest.approx(
        3.0
    )
    left_out = ["similarity.log_gamma2", "similarity.q.weight", "similarity.q.bias"]
    assert taken_over.left_out == left_out
    said = str(taken_over).splitlines()
    assert said[0].endswith(f"tensors taken over from {source}")
    assert said[1] == f"  image_encoder: all {len(network.image_encoder.state_dict())}"
    assert said[3] == "  similarity: none; as configured start similarity.log_gamma2"
    assert said[4] == f"  of the source, not used: {', '.join(left_out)}"
    assert said[5].startswith(
        "  settings that differ: similarity.class_path: medclip_dcl.networks.LSENonLocal (con"
    )


def test_of_a_classifier_the_image_encoder_is_taken(network, small_bert, tmp_path):
    torch.save(classifier(network, ""), tmp_path / "c.ckpt")
    mine = build(small_bert)
    before = copied(mine)
    taken_over = take_over(mine, tmp_path / "c.ckpt")
    assert same(mine.image_encoder.state_dict(), network.image_encoder.state_dict())
    assert taken_over.left_out == ["head.weight"]
    others = [name for name in before if not name.startswith("image_encoder.")]
    assert taken_over.kept == others
    assert all(torch.equal(mine.state_dict()[name], before[name]) for name in others)
    said = str(taken_over)
    assert "text_encoder: none; as configured start text_encoder.model.* (" in said


def test_a_head_of_the_source_needs_a_place(small_bert, source, tmp_path):
    with_head = build(small_bert, masked_language_head=True)
    with_head.save_pretrained(tmp_path / "export")
    mine = build(small_bert)
    before = copied(mine)
    message = r"unexpected \['masked_language_head.bias'.*masked_language_head: True .configured: False"
    with pytest.raises(ValueError, match=message):
        take_over(mine, tmp_path / "export")
    assert same(mine.state_dict(), before)
    assert take_over(build(small_bert, masked_language_head=True), tmp_path / "export").kept == []
    without = take_over(mine, tmp_path / "export", ["image_encoder", "similarity"])
    assert all(name.startswith("text_encoder.") for name in [*without.kept, *without.left_out])
    # A head that the source lacks is listed.
    heads = [name for name in with_head.state_dict() if "masked_language_head" in name]
    assert take_over(with_head, source).kept == heads and len(heads) == 5


def swap_words(folder) -> None:
    vocabulary = (folder / "tokenizer.json").read_text()
    swapped = vocabulary.replace('"edema": ', '"X": ').replace('"cardiomegaly": ', '"edema": ')
    (folder / "tokenizer.json").write_text(swapped.replace('"X": ', '"cardiomegaly": '))


def more_heads(folder) -> None:
    edited(folder, num_attention_heads=4)


@pytest.mark.parametrize(
    "change, message",
    [
        (swap_words, "another tokenizer, so that its weights belong to other tokens"),
        (more_heads, r"another model, with .*num_attention_heads: 2 \(configured: 4\)"),
    ],
)
def test_another_text_encoder_is_refused_with_the_reason(change, message, small_bert, source, tmp_path):
    change(folder := shutil.copytree(small_bert, tmp_path / "bert"))
    mine = build(folder)
    before = copied(mine)
    with pytest.raises(ValueError, match=message) as error:
        take_over(mine, source)
    assert "set text_encoder.init_args.pretrained to the one" in str(error.value)
    assert str(error.value).endswith("with model.init_args.init_parts: [image_encoder, similarity]")
    assert "edema" not in str(error.value)  # tokens come from reports
    assert same(mine.state_dict(), before)
    take_over(mine, source, ["image_encoder", "similarity"])


class Own(ResNetRegions):
    pass


def test_all_misfits_are_said_at_once(small_bert, source):
    mine = build(small_bert, LSENonLocal(dim=4), ResNetRegions(dim=4, stride=16, width=8), dim=4)
    with pytest.raises(ValueError) as error:
        take_over(mine, source)
    for said in ("image_encoder: of another shape", "text_encoder: of another", "similarity: of another"):
        assert said in str(error.value)
    for part in ("image_encoder", "text_encoder", "similarity"):
        assert f"{part}.init_args.dim: 6 (configured: 4)" in str(error.value)
    with pytest.raises(
        ValueError, match="image_encoder is of another class; set image_encoder.class_path: medcl"
    ):
        take_over(build(small_bert, image=Own(dim=6, stride=16, width=8)), source)


def test_parts_are_named_as_they_are(network, small_bert, tmp_path, source):
    mine = build(small_bert)
    with pytest.raises(ValueError, match=r"init_parts: expected some of .*found \['eyes'\]"):
        take_over(mine, source, ["image_encoder", "eyes"])
    with pytest.raises(ValueError, match="init_parts: expected some of .*found none"):
        take_over(mine, source, [])
    torch.save(classifier(network, ""), tmp_path / "c.ckpt")
    with pytest.raises(
        ValueError, match=r"some of image_encoder, .*c.ckpt.*found \['similarity', 'text_encoder'\]"
    ):
        take_over(mine, tmp_path / "c.ckpt", ["similarity", "text_encoder"])
    before = copied(mine)
    text = take_over(mine, source, ["text_encoder"])
    assert same(mine.text_encoder.state_dict(), network.text_encoder.state_dict())
    assert all(torch.equal(mine.state_dict()[name], before[name]) for name in text.kept)
    assert not torch.equal(mine.mean, network.mean)  # they belong to the image encoder


class Code:
    """Runs when it is unpickled as Python does."""

    def __reduce__(self):
        return (print, ("code of the file ran",))


STATE = {"state_dict": {"w": torch.zeros(1)}}


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.ckpt", STATE, "expected a model of kind image-text or classifier, found none"),
        (
            "a.ckpt",
            {"format_version": 3, "network": {"x": 1}, **STATE},
            "found none; a ResNet's state dict is for",
        ),
        ("a.ckpt", {"format_version": 3, "network": {"kind": "classifier"}}, "is not a state dict"),
        ("a.ckpt", {"format_version": 3, "language_model": {}, **STATE}, "language model; score, embed and"),
        ("a.ckpt", {"format_version": 99, "network": {}, **STATE}, "found version 99"),
        (
            "a.ckpt",
            {"format_version": 3, "network": {"kind": "unimodal"}, **STATE},
            "image-text or classifier, found unimodal$",
        ),
        ("a.pth", Code(), "copy the file again, or give one of tensors"),
        ("a.ckpt", {"format_version": 3, "network": {}, **STATE, "x": Code()}, "Python objects are not"),
    ],
)
def test_foreign_files_are_refused(name, content, message, tmp_path, capsys):
    torch.save(content, tmp_path / name)
    with pytest.raises(ValueError, match=message):
        take_over(finding_network(), tmp_path / name)
    assert "code of the file ran" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["a.pth", "old.pth", "a.safetensors"])
def test_truncated_files_are_refused(name, tmp_path):
    state = {"conv1.weight": torch.rand(64, 3, 7, 7), "bn1.weight": torch.rand(64)}
    if name == "a.safetensors":
        save_file(state, tmp_path / name)
    else:
        torch.save(state, tmp_path / name, _use_new_zipfile_serialization=name != "old.pth")
    whole = (tmp_path / name).read_bytes()
    generator = torch.Generator().manual_seed(0)
    some = torch.randint(40, len(whole) - 1, (20,), generator=generator).tolist()
    for length in (*range(0, 40), *some, len(whole) - 1):
        (tmp_path / name).write_bytes(whole[:length])
        with pytest.raises(ValueError, match="truncated"):
            read_model(tmp_path / name).state  # noqa: B018


@pytest.mark.parametrize("kind", ["checkpoint", "exported"])
def test_pretrained_is_no_model_of_this_program(kind, network, tmp_path):
    if kind == "checkpoint":
        torch.save(checkpoint(network), tmp_path / "source")
    else:
        network.save_pretrained(tmp_path / "source")
    with pytest.raises(
        ValueError, match="found a model of this program, .*source; a training starts from it by .*init_from"
    ):
        BertSentences(str(tmp_path / "source"))
