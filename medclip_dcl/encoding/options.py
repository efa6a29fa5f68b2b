"""Options of `score`, `embed`, `rank`, `similar`, `eta` and `encode`, declared without torch and pandas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from medclip_dcl.common.command_line import (
    MODEL,
    device,
    imports,
    option,
    positional,
    positive,
    require_task,
    whole_number,
)

_LANGUAGE_MODEL = "Hugging Face folder or repository id of the language model, or a run that trained one"


@dataclass(frozen=True, kw_only=True)
class Score:
    """Score every distinct sentence of a prepared set by a masked language model, or a causal one.

    The scores (pseudo-log-likelihood, of a causal model the likelihood, natural logarithm) go to
    SET/log_p/NAME.parquet; NAME is the model's folder, a fingerprint of the weights and the options that change the
    scores. Existing scores are not computed again. The same command continues after a kill; the result is the same,
    byte for byte, on the same machine."""

    data: Path = positional(
        "prepared data set; or a file: a sentence a line (.txt), or a table (.csv, .tsv, .jsonl, .parquet)",
        metavar="SET|FILE",
    )
    model: str = option(_LANGUAGE_MODEL, metavar="LM")
    output: Path | None = option(
        "of a FILE: .csv or .parquet, its lines or table with n_tokens, log_p, n_unknown and truncated", None
    )
    device: str = device()
    token_budget: int | None = positive(
        "tokens in a batch (of each thread), which bounds memory (4096 on CPU, for models narrower than 512 16384; "
        "65536 on GPU)",
        None,
    )
    within_word_l2r: bool = option(
        "also mask the later tokens of a word (Kauf & Ivanova, ACL 2023); its scores get a file of their own",
        False,
    )
    dtype: Literal["float32", "bfloat16", "float16"] = option(
        "float32 is the reference; bfloat16 is faster where the CPU has AMX (BERT-base: 3.7 x) or AVX-512 for it "
        "(2 x); float16 is 8 times as precise as bfloat16 (float32)",
        "float32",
    )
    task: int = option("of a SET: score its batches task, task + tasks, ... (0)", 0, type=whole_number(0))
    tasks: int = option(
        "of a SET: commands that share it (SLURM array); the last one to end writes the scores (1)",
        1,
        type=whole_number(1),
    )
    column: str | None = option("of a FILE that is a table: its column of sentences (text)", None)
    per_token: bool = option(
        "of a FILE: a row for each token, with the number of its sentence and position, from 0, token, log_p",
        False,
    )

    def __post_init__(self) -> None:
        require_task(self.task, self.tasks)

    @property
    def suffix(self) -> str:
        """The options that are part of the scores' name."""
        parts = ["within_word_l2r"] if self.within_word_l2r else []
        parts += [self.dtype] if self.dtype != "float32" else []
        return "".join(f"-{part}" for part in parts)


@dataclass(frozen=True, kw_only=True)
class Embed:
    """Embed every distinct sentence of a prepared set by the initial, frozen text encoder, of any family that trains.

    LM is what text_encoder.init_args.pretrained takes, or a run that trained a language model. The embeddings, pooled
    hidden states before any projection, in float32, go to SET/text_embedding/NAME.parquet; NAME is the folder's name, a
    fingerprint of the weights and "-POOLING" for another pooling than the family's own. Existing embeddings are not
    computed again, and the same command continues after a kill. Objectives by text similarity read them.
    """

    data: Path = positional("prepared data set", metavar="SET")
    model: str = option(_LANGUAGE_MODEL, metavar="LM")
    device: str = device()
    pooling: Literal["cls", "mean", "last", "pooler"] | None = option(
        "cls: hidden state of the first token (choice, not from the paper); mean: over all tokens, special ones "
        "included; last: of the last token; pooler: the model's own (pooler for CLIP and SigLIP, else cls)",
        None,
    )
    batch_tokens: int | None = positive(
        "tokens in a batch, which bounds memory (4096 on CPU, 65536 on GPU)", None
    )


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Learn from the training reports which reports fit a sentence, for the objective RankedByText.

    Two linear models of words and phrases (tf-idf of 1 to 3 words) learn to tell a sentence's own report: one by the
    rest of the report, one by the report's labels, which a set without any lacks. The rank of a report for a sentence
    is that of the sum of both scores. SET/ranking/NAME.parquet gets a vector for each sentence of the set and the
    quantiles of its scores over at most 2,000 training reports; SET/ranking_reports/NAME.parquet a vector for each
    report of train and validate. NAME has a fingerprint of reports, labels, their codes and options. An existing
    ranking is not learned again; a killed command leaves nothing and starts anew. On a phantom the truth says how well
    reports are ranked.

    With --posterior a mention model takes the ranking's place, for the objective PosteriorTargets: the chance that a
    report with these labels says a sentence. Its vectors go to SET/posterior and SET/posterior_reports.
    """

    data: Path = positional("prepared data set with reports", metavar="SET")
    labels: Path | None = option(
        "Parquet table of labels by study_id, 1, 0, -1 or blank in each other column, in place of SET/labels.parquet",
        None,
    )
    rest_alone: bool = option("rank by the rest of the report alone, without labels", False)
    posterior: bool = option("learn a mention model from the labels in place of a ranking", False)


@dataclass(frozen=True, kw_only=True)
class Similar:
    """Print what the similarity of texts finds: images counted as fitting a sentence, and the mass of soft targets.

    The anchors are the sentences of training reports, each with its own image; the candidates are other training
    images. First table: the share of candidates that `NearTexts` counts as fitting at each threshold, and their number
    in a batch. Second table: the target probability that `SoftTargets` gives, at each temperature, to the own image and
    to the others of a batch. On a phantom, whose truth is known, both say how often that is right."""

    data: Path = positional("prepared data set with sentence embeddings", metavar="SET")
    model: str | None = option(
        "name of a language model that embed has run, or the stem of a file in SET/text_embedding (the only one)",
        None,
        metavar="LM",
    )
    images: int = positive("training images, drawn at random (1000)", 1000)
    batch_size: int = positive("images in a batch (64)", 64)


@dataclass(frozen=True, kw_only=True)
class Eta:
    """Describe what a language model's sentence scores give: eta(x) = a * p_LM(x)^k of the training reports' sentences.

    Into SET/eta/ (or --output FOLDER) go

    - report.md and eta.png: quantiles, correlations, histograms, the number of false negatives in a batch, and the
      most and least probable sentences. report.md holds report texts: it is patient data where the reports are;
    - class_probability.yaml, the configuration to train with:
      medclip-dcl fit --config mimic_cxr --config objective/dcl_lm \\
          --config SET/eta/class_probability.yaml
      It holds SSD's (a, k), or --a and --k. If training would warn that these do not fit the scores, it holds SSD's
      constant eta instead, and the command says so."""

    data: Path = positional("prepared data set with scores", metavar="SET")
    log_p: str | None = option("stem of a file in SET/log_p (the only one)", None, metavar="NAME")
    output: Path | None = option("folder of the report (SET/eta)", None, metavar="FOLDER")
    a: float | None = option("use this a, with --k, instead of SSD's", None)
    k: float | None = option("use this k, with --a, instead of SSD's", None)
    sentences: Path | None = option(
        "CSV file of sentences with finding and sign (+ present, - absent), of several rows of a sentence all: the "
        "reports' labels then say of how many reports it may be true",
        None,
    )


@dataclass(frozen=True, kw_only=True)
class Encode:
    """Encode every image and sentence of a prepared set once, by the frozen encoders of an image-text model.

    The features go to SET/features/NAME/: those of images before the projection, in the view of evaluation, in float16;
    pooled sentence states in float32. Training of projections and similarity alone then reads them in place of images
    and tokens (--config heads). The same command continues after a kill, which costs at most 20 seconds."""

    model: str = positional(MODEL, metavar="MODEL")
    data: Path = positional("prepared data set", metavar="SET")
    device: str = device()
    name: str | None = option(
        "folder in SET/features (the model's name and a fingerprint)", None, metavar="NAME"
    )
    image_size: int | None = positive(
        "side in pixels of the whole image, data.image_size of the training (that of the model)", None
    )
    evaluation_crop: int | None = positive(
        "side in pixels of the middle square, data.evaluation_crop of the training (the whole image)", None
    )
    batch_size: int = positive("images in a batch, which bounds memory (64)", 64)
    workers: int | None = positive("processes that read images (with a GPU one a core, else none)", None)
    imported: Sequence[str] = imports()
