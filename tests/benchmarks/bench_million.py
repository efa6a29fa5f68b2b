"""Start of training on a simulated set of a million images: CPU seconds and memory of a process and its loader workers.

    python tests/benchmarks/bench_million.py --images 50000 --folder SOMEWHERE [--root ANOTHER_CHECKOUT] [--rounds 2]

Run by hand, never in CI: a million images take some minutes, 10 GB of memory and a million names of files. The set is
in MIMIC-CXR's proportions: 0.6 studies an image, 3.5 studies a patient, 1.3 distinct sentences an image, 8.5 mentions a
report. All image files are names of a few files of 64 x 64 pixels. With --sharded the same images are written into
shards at once, without the names (five million: 8 GB). Each round is a process of its own, as each of the later ranks
of a node, or a later start.

- fingerprint: `PreparedSet.changes`, as the program calls it before anything else.
- load: `setup("fit")` of the datamodule for a model with log p.
- training: the first batches of 64 with two loader processes, then the tables of validation.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
STUDIES, PATIENTS, SENTENCES, MENTIONS = 0.6, 0.29, 1.3, 8.5
"""Studies and distinct sentences of an image, patients of a study, mentions of a report."""
WORDS, BATCHES, WORKERS = 3000, 5, 2
_LINKS = 10_000


def make_words(count: int) -> list[str]:
    import numpy as np

    generator = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    found = {"".join(generator.choice(letters, size)) for size in generator.integers(3, 11, 2 * count)}
    return sorted(found)[:count]


def make_set(folder: Path, count: int, is_sharded: bool) -> None:
    """Write the set, but for labels of test and boxes."""
    import numpy as np
    import pandas as pd
    from PIL import Image

    from medclip_dcl.common.files import digest, digest_of_file, write_json
    from medclip_dcl.common.findings import CHEXPERT
    from medclip_dcl.data.prepared import FORMAT_VERSION, case_table, seal, write_table

    generator = np.random.default_rng(0)
    studies, sentences = round(STUDIES * count), round(SENTENCES * count)
    patients = round(PATIENTS * studies)
    patient_of_study = generator.integers(patients, size=studies)
    study = np.sort(np.r_[np.arange(studies), generator.integers(studies, size=count - studies)])
    patient = patient_of_study[study]
    use = np.where(generator.random(patients) < 0.02, "validate", "train")
    use[generator.random(patients) < 0.015] = "test"
    names = [generator.bytes(20).hex() for _ in range(count)]
    dicom_id = ["-".join((x[:8], x[8:16], x[16:24], x[24:32], x[32:])) for x in names]
    study_id, subject_id = 50_000_000 + study, 10_000_000 + patient
    # Few folders, names as long as those of MIMIC-CXR.
    path = [
        f"files/p{10 + place % 10}/{place // 1000:05}/p{subject}_s{own}_{name}.jpg"
        for place, (subject, own, name) in enumerate(
            zip(subject_id.tolist(), study_id.tolist(), dicom_id, strict=True)
        )
    ]
    images = pd.DataFrame(
        {
            "dicom_id": dicom_id,
            "subject_id": subject_id,
            "study_id": study_id,
            "view": "PA",
            "official_split": use[patient],
            "use": use[patient],
            "path": path,
            "height": 3056,
            "width": 2544,
        }
    )
    words, text = make_words(WORDS), list[str]()
    share = 1 / np.arange(1, WORDS + 1)
    share /= share.sum()
    for length in np.array_split(generator.integers(3, 22, sentences), max(1, sentences // 100_000)):
        drawn = generator.choice(WORDS, length.sum(), p=share)
        ends = np.cumsum(length)
        text += [
            f"{' '.join(words[word] for word in some)}. {len(text) + place}"
            for place, some in enumerate(np.split(drawn, ends[:-1]))
        ]
    more = round(MENTIONS * studies) - sentences
    said = np.r_[np.arange(sentences), (sentences ** generator.random(more)).astype(int)]
    of = generator.integers(studies, size=len(said))
    order = np.argsort(of, kind="stable")
    said, of = said[order], of[order]
    reports = pd.DataFrame(
        {
            "study_id": 50_000_000 + of,
            "section": "findings",
            "position": np.arange(len(of)),
            "sentence_id": said,
        }
    )
    labels = pd.DataFrame({"study_id": 50_000_000 + np.arange(studies)}).assign(
        **{name: generator.choice([1.0, 0.0, -1.0, np.nan], studies) for name in CHEXPERT}
    )
    table = pd.DataFrame({"sentence_id": np.arange(sentences), "text": text})
    table["n_reports"] = np.bincount(said, minlength=sentences)
    scores = pd.DataFrame({"sentence_id": table["sentence_id"], "n_tokens": 12})
    scores["log_p"] = -generator.exponential(20, sentences)
    encoded = io.BytesIO()
    Image.fromarray(generator.integers(0, 255, (64, 64)).astype(np.uint8)).save(encoded, "JPEG", quality=5)
    content = encoded.getvalue()
    files = pd.DataFrame(
        {"path": path, "bytes": len(content), "digest": digest(content), "original_bytes": 1_700_000}
    )
    tables = {
        "images": images,
        "sentences": table,
        "reports": reports,
        "labels": labels,
        "image_files": files,
    }
    tables["cases"] = case_table(images, labels)
    for name, frame in tables.items():
        write_table(frame, folder / f"{name}.parquet", name)
    image_files = digest_of_file(folder / "image_files.parquet")
    (write_shards if is_sharded else write_files)(folder, path, content, image_files)
    scores.attrs.update(seal(scores, table))
    write_table(scores, folder / "log_p/some-0123.parquet", "log_p")
    (folder / "rejects.csv").write_text("kind,id,reason\n", encoding="utf-8")
    info = {
        "format_version": FORMAT_VERSION,
        "source": "simulated",
        "phantom": True,
        "options": {},
        "counts": {"images_in_release": count},
        "fingerprint": f"{count:016x}",
        "digests": {name: digest_of_file(folder / f"{name}.parquet") for name in tables},
    }
    write_json(info, folder / "dataset.json")


def write_files(folder: Path, paths: list[str], content: bytes, image_files: str) -> None:
    """Write one content under all these paths."""
    for parent in {os.path.dirname(path) for path in paths}:
        (folder / "images" / parent).mkdir(parents=True, exist_ok=True)
    for place, path in enumerate(paths):
        file = folder / "images" / path
        if place % _LINKS == 0:
            first = file
            first.write_bytes(content)
        else:
            os.link(first, file)


def write_shards(folder: Path, paths: list[str], content: bytes, image_files: str) -> None:
    """Write one content as each image's member of a shard, as `medclip-dcl shard` would, and the index."""
    import numpy as np
    import pyarrow as pa

    from medclip_dcl.common.files import digest_of_file
    from medclip_dcl.data.shards import COLUMNS, HEADER, ShardIndex, member, shard_file

    data = content.ljust(-(-len(content) // HEADER) * HEADER, b"\0")
    member_bytes, row = HEADER + len(data), np.arange(len(paths))
    in_shard = 1_000_000_000 // member_bytes
    shards = []
    for number, start in enumerate(range(0, len(paths), in_shard)):
        file = shard_file(folder, number)
        file.parent.mkdir(exist_ok=True)
        with file.open("wb") as stream:
            for place in range(start, min(start + in_shard, len(paths))):
                info = tarfile.TarInfo(member(place))
                info.size = len(content)
                stream.write(info.tobuf(tarfile.USTAR_FORMAT) + data)
            stream.write(bytes(2 * HEADER))
        shards.append((file.stat().st_size, digest_of_file(file)))
    places = [row // in_shard, row % in_shard * member_bytes + HEADER, np.full(len(row), len(content))]
    index = pa.table([paths, *places], pa.schema([*COLUMNS.items()]))
    ShardIndex(folder, index, shards, False, image_files).write()


def make_bert(folder: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM, BertTokenizer

    from medclip_dcl.networks.bert_folder import save_language_model

    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"0123456789.", *(f"##{x}" for x in "0123456789")]
    pieces += [word for word in make_words(WORDS) if word not in pieces]
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=len(pieces), max_position_embeddings=64, **size)
    tokenizer = BertTokenizer(vocab={piece: number for number, piece in enumerate(pieces)})
    save_language_model(BertForMaskedLM(config), tokenizer, folder)


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def memory(process: str = "self") -> dict[str, float]:
    """Proportional and private megabytes of a process."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    private = kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]
    return {
        "pss": kilobytes["Pss"] / 1000,
        "private": private / 1000,
        "dirty": kilobytes["Private_Dirty"] / 1000,
    }


def measure(folder: Path, language_model: Path, workers: int, tokenises: bool) -> dict[str, Any]:
    """Seconds and megabytes of one start, in this process."""
    from dataclasses import replace

    from medclip_dcl.data.image_text import ImageTextDataModule
    from medclip_dcl.data.prepared import PreparedSet
    from medclip_dcl.models.image_text import ImageTextModel
    from medclip_dcl.networks.image_encoder import ResNetRegions
    from medclip_dcl.networks.similarity import LSENonLocal
    from medclip_dcl.networks.text_encoder import BertSentences
    from medclip_dcl.objectives import LanguageModelClassProbability

    model = ImageTextModel(
        ResNetRegions(depth=18, weights=None, dim=128),
        BertSentences(str(language_model), dim=128, max_tokens=64),
        LSENonLocal(),
        class_probability=LanguageModelClassProbability(),
    )
    found: dict[str, Any] = {"before": memory()}
    start, wall = cpu_seconds(), time.perf_counter()
    prepared = PreparedSet(folder)
    assert prepared.changes == ""
    found["fingerprint_seconds"] = cpu_seconds() - start
    options: dict[str, Any] = {"image_size": 64, "crop_size": 48, "batch_size": 64, "num_workers": workers}
    data = ImageTextDataModule(str(folder), **options)
    data.prepared = prepared  # as the program does since it shares one
    required = model.requirements()
    if not tokenises:
        fixed: dict[str, Any] = {
            "tokenize": lambda texts: [[2, *range(5, 25), 3]] * len(texts),
            "are_truncated": None,
        }
        required = replace(required, tokenizer="fixed", **fixed)
    data.connect(required)
    start = cpu_seconds()
    data.setup("fit")
    found["load_seconds"], found["loaded"] = cpu_seconds() - start, memory()
    loader = data.train_dataloader()
    start = cpu_seconds()
    batches = iter(loader)
    taken = [next(batches) for _ in range(BATCHES)]
    found["digest"] = [round(float(batch["anchor"]["log_p"].double().sum()), 6) for batch in taken]
    found["tokens"] = [int(batch["tokens"].sum()) for batch in taken]
    found["workers"] = [memory(str(process.pid)) for process in multiprocessing.active_children()]
    found["batches_seconds"] = cpu_seconds() - start
    start = cpu_seconds()
    tables = data.evaluation("validate")
    found["validate_images"], found["evaluation_seconds"] = len(tables.images), cpu_seconds() - start
    found["end"], found["wall"] = memory(), time.perf_counter() - wall
    found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument(
        "--folder", type=Path, required=True, help="of the set and the model; made if it is not there"
    )
    parser.add_argument("--root", type=Path, default=HERE.parents[2], help="checkout whose code is measured")
    parser.add_argument("--rounds", type=int, default=2, help="starts one after the other")
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--sharded", action="store_true", help="make the set in shards, without image files")
    parser.add_argument(
        "--fixed_tokens", action="store_true", help="22 tokens a sentence: what is beyond tokenising"
    )
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    prepared = options.folder / f"set_{options.images}{'_sharded' * options.sharded}"
    language_model = options.folder / "bert"
    if options.measure:
        found = measure(prepared, language_model, options.workers, not options.fixed_tokens)
        print(json.dumps(found))
        return
    sys.path.insert(0, str(options.root))
    if not (language_model / "config.json").is_file():
        make_bert(language_model)
    if not (prepared / "dataset.json").is_file():
        shutil.rmtree(prepared, ignore_errors=True)
        make_set(prepared, options.images, options.sharded)
    environment = {**os.environ, "PYTHONPATH": str(options.root)}
    words = ["--images", str(options.images), "--folder", str(options.folder)]
    words += ["--workers", str(options.workers), *["--sharded"] * options.sharded]
    words += ["--fixed_tokens"] * options.fixed_tokens
    for number in range(options.rounds):
        done = subprocess.run(
            [sys.executable, str(HERE), *words, "--measure"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(done.stderr)
        found = json.loads(done.stdout.splitlines()[-1])
        print(f"start {number + 1}: {json.dumps(found)}")


if __name__ == "__main__":
    main()
