"""The phantom's classes as they are written down: places, grades, frequencies of the common ones, words, labels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from data_prep.phantom.findings import SIDES, ZONES, Rule, StudyState
from data_prep.phantom.language import NounPhrase, phrases


@dataclass(frozen=True)
class Entry:
    """A class as it is written down below, before the frequencies of the long tail and the wordings are drawn."""

    name: str
    kind: str
    words: tuple[NounPhrase, ...]
    family: str = "finding"
    side: str = ""
    zone: str = ""
    grade: str = ""
    frequency: float | None = 0.0  # None: a place in the long tail
    category: str = ""
    labels: dict[str, float] = field(default_factory=dict)
    system: int = 1
    may_hedge: bool = False
    rule: Rule | None = None


# ---------------------------------------------------------------------------------------------- findings


def chex5_entries() -> list[Entry]:
    entries = []
    adverb = {"mild": "mildly", "moderate": "moderately", "severe": "severely"}
    for grade, share in (("mild", 0.45), ("moderate", 0.33), ("severe", 0.22)):
        entries.append(
            Entry(
                f"cardiomegaly_{grade}",
                "cardiomegaly",
                phrases(
                    (
                        "m:{grade} cardiomegaly",
                        "{grade} enlargement of the cardiac silhouette",
                        f"{adverb[grade]} enlarged heart",
                        f"{adverb[grade]} enlarged cardiac silhouette",
                        "m:{grade} cardiac enlargement",
                    ),
                    grade=grade,
                ),
                grade=grade,
                frequency=0.24 * share,
                category="Cardiomegaly",
                labels={"Cardiomegaly": 1.0},
                system=3,
                may_hedge=grade == "mild",
            )
        )
        entries.append(
            Entry(
                f"edema_{grade}",
                "edema",
                phrases(
                    (
                        "m:{grade} pulmonary edema",
                        "m:{grade} interstitial pulmonary edema",
                        "m:{grade} pulmonary vascular congestion with edema",
                        "m:{grade} perihilar haziness compatible with pulmonary edema",
                        "{grade} degree of pulmonary edema",
                    ),
                    grade=grade,
                ),
                grade=grade,
                frequency=0.18 * share,
                category="Edema",
                labels={"Edema": 1.0},
                may_hedge=True,
            )
        )
    for side in SIDES:
        for grade, share in (("small", 0.4), ("moderate", 0.35), ("large", 0.25)):
            entries.append(
                Entry(
                    f"effusion_{side}_{grade}",
                    "effusion",
                    phrases(
                        (
                            "{grade} {side} pleural effusion",
                            "{grade} pleural effusion on the {side}",
                            "{grade} {side}-sided effusion",
                            "{grade} amount of pleural fluid on the {side}",
                            "{grade} layering effusion at the {side} base",
                        ),
                        side=side,
                        grade=grade,
                    ),
                    side=side,
                    grade=grade,
                    frequency=0.22 * 0.675 * share,
                    category="Pleural Effusion",
                    labels={"Pleural Effusion": 1.0},
                    system=2,
                    may_hedge=grade == "small",
                )
            )
            entries.append(
                Entry(
                    f"pneumothorax_{side}_{grade}",
                    "pneumothorax",
                    phrases(
                        (
                            "{grade} {side} pneumothorax",
                            "{grade} pneumothorax on the {side}",
                            "{grade} {side} apical pneumothorax",
                            "{side} pleural line consistent with a {grade} pneumothorax",
                            "{grade} {side}-sided pneumothorax",
                        ),
                        side=side,
                        grade=grade,
                    ),
                    side=side,
                    grade=grade,
                    frequency=0.14 * 0.5 * share,
                    category="Pneumothorax",
                    labels={"Pneumothorax": 1.0},
                    system=2,
                    may_hedge=grade == "small",
                )
            )
        for zone, zone_share in (("upper", 0.18), ("mid", 0.27), ("lower", 0.55)):
            for grade, share in (("patchy", 0.55), ("dense", 0.45)):
                entries.append(
                    Entry(
                        f"pneumonia_{side}_{zone}_{grade}",
                        "pneumonia",
                        phrases(
                            (
                                "{grade} opacity in the {where} compatible with pneumonia",
                                "{grade} {where} consolidation consistent with pneumonia",
                                "m:{grade} {where} pneumonia",
                                "{grade} airspace opacity in the {where} reflecting pneumonia",
                            ),
                            side=side,
                            zone=zone,
                            grade=grade,
                        ),
                        side=side,
                        zone=zone,
                        grade=grade,
                        frequency=0.165 * 0.5 * 1.2 * zone_share * share,
                        category="Pneumonia",
                        labels={"Pneumonia": 1.0, "Lung Opacity": 1.0},
                        may_hedge=True,
                    )
                )
    return entries


# kind -> (MS-CXR category, CheXpert column, report system, zones, noun phrases). Findings that MS-CXR has no category
# for take the nearest of the eight: what is dense in the lung is an opacity, what is lucent at the lung's edge stands
# with pneumothorax, the pleura with effusion, the cardiomediastinal contour with cardiomegaly, lost volume with
# atelectasis.
_FOCAL: dict[str, tuple[str, str, int, tuple[str, ...], tuple[str, ...]]] = {
    "nodule": (
        "Lung Opacity",
        "Lung Lesion",
        1,
        ZONES,
        ("nodule in the {where}", "nodular opacity in the {where}", "{where} pulmonary nodule"),
    ),
    "mass": (
        "Lung Opacity",
        "Lung Lesion",
        1,
        ZONES,
        ("mass in the {where}", "{where} mass", "large rounded mass-like opacity in the {where}"),
    ),
    "granuloma": (
        "Lung Opacity",
        "Lung Lesion",
        1,
        ZONES,
        ("calcified granuloma in the {where}", "{where} calcified granuloma", "dense {where} granuloma"),
    ),
    "cavity": (
        "Lung Opacity",
        "Lung Lesion",
        1,
        ZONES,
        (
            "cavitary lesion in the {where}",
            "thick-walled cavity in the {where}",
            "{where} cavitary lesion with an air-fluid level",
        ),
    ),
    "linear_atelectasis": (
        "Atelectasis",
        "Atelectasis",
        1,
        ZONES,
        (
            "m:linear atelectasis in the {where}",
            "m:plate-like {where} atelectasis",
            "band of {where} atelectasis",
        ),
    ),
    "bulla": (
        "Pneumothorax",
        "",
        1,
        ZONES,
        ("bulla in the {where}", "thin-walled {where} bulla", "large emphysematous bulla in the {where}"),
    ),
    "reticulation": (
        "Lung Opacity",
        "Lung Opacity",
        1,
        ZONES,
        (
            "p:reticular opacities in the {where}",
            "m:{where} interstitial fibrosis",
            "p:coarse {where} interstitial markings",
        ),
    ),
    "ground_glass": (
        "Lung Opacity",
        "Lung Opacity",
        1,
        ZONES,
        (
            "ground-glass opacity in the {where}",
            "hazy {where} opacity",
            "area of ground-glass attenuation in the {where}",
        ),
    ),
    "infarct": (
        "Consolidation",
        "Consolidation",
        1,
        ("mid", "lower"),
        (
            "wedge-shaped peripheral consolidation in the {where}",
            "peripheral {where} consolidation with a pleural base",
            "pleural-based wedge-shaped {where} opacity suspicious for infarction",
        ),
    ),
    "pleural_plaque": (
        "Pleural Effusion",
        "Pleural Other",
        2,
        ("mid", "lower"),
        (
            "calcified pleural plaque along the {where}",
            "pleural plaque at the {where}",
            "m:pleural thickening with calcification along the {where}",
        ),
    ),
    "clips": (
        "",
        "",
        0,
        ZONES,
        (
            "p:surgical clips projecting over the {where}",
            "p:metallic clips in the {where}",
            "chain of surgical sutures in the {where}",
        ),
    ),
    "rib_fracture": (
        "",
        "Fracture",
        5,
        ZONES,
        (
            "displaced rib fracture over the {where}",
            "lateral rib fracture at the level of the {where}",
            "healing fracture of a rib overlying the {where}",
        ),
    ),
}

_SIDED: dict[str, tuple[str, str, int, tuple[str, ...], tuple[str, ...]]] = {
    "apical_cap": (
        "Pleural Effusion",
        "Pleural Other",
        2,
        ("",),
        (
            "m:{side} apical pleural thickening",
            "{side} apical cap",
            "m:pleural thickening at the {side} apex",
        ),
    ),
    "hilar_enlargement": (
        "Cardiomegaly",
        "Enlarged Cardiomediastinum",
        4,
        ("",),
        ("m:{side} hilar enlargement", "prominent {side} hilum", "m:enlargement of the {side} hilum"),
    ),
    "elevated_diaphragm": (
        "Atelectasis",
        "",
        2,
        ("",),
        (
            "m:elevation of the {side} hemidiaphragm",
            "elevated {side} hemidiaphragm",
            "m:{side} hemidiaphragm elevation with volume loss",
        ),
    ),
    "collapse": (
        "Atelectasis",
        "Atelectasis",
        1,
        ("upper", "lower"),
        (
            "m:{side} {zone} lobe collapse",
            "m:complete atelectasis of the {side} {zone} lobe",
            "collapsed {side} {zone} lobe with loss of volume",
        ),
    ),
    "emphysema_subcutaneous": (
        "",
        "",
        5,
        ("",),
        (
            "m:subcutaneous emphysema along the {side} chest wall",
            "m:{side} chest wall subcutaneous air",
            "m:air in the soft tissues of the {side} chest",
        ),
    ),
    "clavicle_fracture": (
        "",
        "Fracture",
        5,
        ("",),
        (
            "{side} clavicle fracture",
            "fracture of the midshaft of the {side} clavicle",
            "displaced fracture of the {side} clavicle",
        ),
    ),
    "shoulder_prosthesis": (
        "",
        "",
        5,
        ("",),
        (
            "{side} shoulder prosthesis",
            "{side} shoulder arthroplasty",
            "metallic prosthesis of the {side} humeral head",
        ),
    ),
    "picc": (
        "",
        "Support Devices",
        0,
        ("",),
        (
            "{side} PICC line terminating in the superior vena cava",
            "{side}-sided PICC",
            "{side} upper extremity PICC with its tip in the low SVC",
        ),
    ),
    "jugular_line": (
        "",
        "Support Devices",
        0,
        ("",),
        (
            "{side} internal jugular central venous catheter",
            "{side} IJ line terminating in the SVC",
            "{side} jugular catheter with its tip in the superior vena cava",
        ),
    ),
    "port": (
        "",
        "Support Devices",
        0,
        ("",),
        (
            "{side} chest wall port with its catheter ending in the SVC",
            "{side} Port-A-Cath",
            "{side} subclavian infusion port",
        ),
    ),
    "pacemaker_single": (
        "",
        "Support Devices",
        0,
        ("",),
        (
            "{side} chest wall pacemaker with a single right ventricular lead",
            "single-lead {side} pectoral pacemaker",
            "{side}-sided single-chamber pacemaker",
        ),
    ),
    "pacemaker_dual": (
        "",
        "Support Devices",
        0,
        ("",),
        (
            "{side} chest wall pacemaker with right atrial and right ventricular leads",
            "dual-lead {side} pectoral pacemaker",
            "{side}-sided dual-chamber pacemaker",
        ),
    ),
    "chest_tube": (
        "",
        "Support Devices",
        0,
        ("",),
        (
            "{side} chest tube",
            "{side}-sided thoracostomy tube with its tip at the apex",
            "{side} pleural drain directed toward the apex",
        ),
    ),
    "pigtail": (
        "",
        "Support Devices",
        0,
        ("",),
        (
            "{side} basal pigtail catheter",
            "pigtail drain coiled at the {side} lung base",
            "{side} pleural pigtail catheter",
        ),
    ),
}

_CENTRAL: dict[str, tuple[str, str, int, tuple[str, ...]]] = {
    "fissural_fluid": (
        "Pleural Effusion",
        "Pleural Effusion",
        2,
        (
            "m:fluid in the minor fissure",
            "loculated collection of fluid in the minor fissure",
            "lenticular opacity in the minor fissure reflecting loculated fluid",
        ),
    ),
    "hiatal_hernia": (
        "Cardiomegaly",
        "",
        4,
        ("hiatal hernia", "retrocardiac air-fluid level from a hiatal hernia", "large hernia of the stomach"),
    ),
    "enlarged_knob": (
        "Cardiomegaly",
        "Enlarged Cardiomediastinum",
        4,
        ("enlarged aortic knob", "prominent aortic arch", "m:aneurysmal dilation of the aortic arch"),
    ),
    "tortuous_aorta": (
        "Cardiomegaly",
        "Enlarged Cardiomediastinum",
        4,
        (
            "tortuous aorta",
            "unfolded and tortuous descending thoracic aorta",
            "m:tortuosity of the thoracic aorta",
        ),
    ),
    "wide_mediastinum": (
        "Cardiomegaly",
        "Enlarged Cardiomediastinum",
        4,
        ("widened mediastinum", "m:widening of the upper mediastinum", "wide superior mediastinal contour"),
    ),
    "paratracheal_mass": (
        "Cardiomegaly",
        "Enlarged Cardiomediastinum",
        4,
        (
            "right paratracheal mass",
            "m:right paratracheal lymphadenopathy",
            "lobulated soft tissue density in the right paratracheal region",
        ),
    ),
    "miliary": (
        "Lung Opacity",
        "Lung Opacity",
        1,
        (
            "p:innumerable miliary nodules",
            "miliary pattern in both lungs",
            "p:tiny nodules diffusely distributed throughout both lungs",
        ),
    ),
    "aortic_calcification": (
        "",
        "",
        4,
        (
            "calcified aortic knob",
            "p:atherosclerotic calcifications at the aortic arch",
            "rim of calcification in the aortic arch",
        ),
    ),
    "free_air": (
        "",
        "",
        6,
        (
            "m:free air under the diaphragm",
            "m:pneumoperitoneum",
            "m:free intraperitoneal air beneath the right hemidiaphragm",
        ),
    ),
    "endotracheal_tube": (
        "",
        "Support Devices",
        0,
        (
            "endotracheal tube terminating above the carina",
            "ET tube in standard position",
            "appropriately positioned endotracheal tube",
        ),
    ),
    "endotracheal_tube_low": (
        "",
        "Support Devices",
        0,
        (
            "endotracheal tube terminating in the right main bronchus",
            "low-lying ET tube",
            "endotracheal tube that should be withdrawn",
        ),
    ),
    "tracheostomy": (
        "",
        "Support Devices",
        0,
        ("tracheostomy tube", "tracheostomy in place", "tracheostomy tube in unremarkable position"),
    ),
    "enteric_tube": (
        "",
        "Support Devices",
        0,
        (
            "nasogastric tube ending in the stomach",
            "enteric tube coursing below the diaphragm",
            "NG tube with its tip in the gastric body",
        ),
    ),
    "enteric_tube_high": (
        "",
        "Support Devices",
        0,
        (
            "nasogastric tube ending in the distal esophagus",
            "malpositioned enteric tube that should be advanced",
            "NG tube with its tip above the diaphragm",
        ),
    ),
    "sternotomy_wires": (
        "",
        "Support Devices",
        0,
        ("p:median sternotomy wires", "p:intact sternal wires", "p:midline sternal cerclage wires"),
    ),
    "valve_prosthesis": (
        "",
        "Support Devices",
        0,
        ("prosthetic cardiac valve", "mitral valve prosthesis", "metallic valve replacement"),
    ),
    "pulmonary_artery_catheter": (
        "",
        "Support Devices",
        0,
        (
            "Swan-Ganz catheter",
            "pulmonary artery catheter with its tip in the right pulmonary artery",
            "Swan-Ganz catheter ending in the right hilum",
        ),
    ),
    "spinal_hardware": (
        "",
        "",
        5,
        (
            "m:spinal fusion hardware",
            "p:thoracic pedicle screws and rods",
            "m:posterior fusion hardware in the thoracic spine",
        ),
    ),
    "scoliosis_right": (
        "",
        "",
        5,
        (
            "dextroscoliosis of the thoracic spine",
            "m:scoliosis of the thoracic spine convex to the right",
            "m:rightward curvature of the spine",
        ),
    ),
    "scoliosis_left": (
        "",
        "",
        5,
        (
            "levoscoliosis of the thoracic spine",
            "m:scoliosis of the thoracic spine convex to the left",
            "m:leftward curvature of the spine",
        ),
    ),
}


def tail_entries() -> list[Entry]:
    """The long tail: localised findings and devices, each in every place it can have."""
    entries = []
    for kind, (category, column, system, zones, texts) in {**_FOCAL, **_SIDED}.items():
        for side in SIDES:
            for zone in zones:
                slots = {"side": side} | ({"zone": zone} if zone else {})
                entries.append(
                    Entry(
                        "_".join(filter(None, (kind, side, zone))),
                        kind,
                        phrases(texts, **slots),
                        side=side,
                        zone=zone,
                        frequency=None,
                        category=category,
                        labels={column: 1.0} if column else {},
                        system=system,
                    )
                )
    for kind, (category, column, system, texts) in _CENTRAL.items():
        entries.append(
            Entry(
                kind,
                kind,
                phrases(texts),
                frequency=None,
                category=category,
                labels={column: 1.0} if column else {},
                system=system,
            )
        )
    return entries


# ---------------------------------------------------------------------------------------------- derived classes

LUNG_KINDS = frozenset(
    (
        "edema",
        "pneumonia",
        "nodule",
        "mass",
        "granuloma",
        "cavity",
        "linear_atelectasis",
        "bulla",
        "reticulation",
    )
    + ("ground_glass", "infarct", "collapse", "miliary")
)
MEDIASTINAL_KINDS = frozenset(
    ("enlarged_knob", "tortuous_aorta", "wide_mediastinum", "paratracheal_mass", "hiatal_hernia")
)
BONE_KINDS = frozenset(
    ("rib_fracture", "clavicle_fracture", "scoliosis_right", "scoliosis_left", "shoulder_prosthesis")
    + ("spinal_hardware",)
)
ACUTE_KINDS = frozenset(
    (
        "edema",
        "effusion",
        "pneumonia",
        "pneumothorax",
        "ground_glass",
        "infarct",
        "collapse",
        "free_air",
        "miliary",
    )
    + ("rib_fracture", "clavicle_fracture", "emphysema_subcutaneous", "fissural_fluid", "cavity", "mass")
    + ("endotracheal_tube_low", "enteric_tube_high")
)
FLUID_KINDS = frozenset(("effusion", "fissural_fluid"))
CONSOLIDATION_KINDS = frozenset(("pneumonia", "infarct", "collapse"))
TUBE_KINDS = frozenset(
    ("endotracheal_tube", "tracheostomy", "enteric_tube", "jugular_line", "picc", "port", "chest_tube")
)
MISPLACED_KINDS = frozenset(("endotracheal_tube_low", "enteric_tube_high"))
_GRADE_ORDER = {"small": 1, "moderate": 2, "large": 3}


def _present(kind: str, side: str = "", zone: str = "") -> Rule:
    return lambda state: state.has(kind, side, zone)


def _any_of(kinds: Iterable[str]) -> Rule:
    return lambda state: state.any_of(kinds)


def _none_of(kinds: Iterable[str]) -> Rule:
    return lambda state: not state.any_of(kinds)


def _larger_effusion(side: str, other: str) -> Rule:
    return lambda state: _effusion_grade(state, side) > _effusion_grade(state, other) > 0


def _effusion_grade(state: StudyState, side: str) -> int:
    return max(
        (_GRADE_ORDER[f.grade] for f in state.findings if f.kind == "effusion" and f.side == side), default=0
    )


def _rule(name: str, texts: Sequence[str], rule: Rule, **options: object) -> Entry:
    number = str(options.pop("number", "s"))
    slots = {k: str(options.pop(k)) for k in ("side", "zone") if k in options}
    return Entry(name, "derived", phrases(texts, number, **slots), rule=rule, **options)  # type: ignore[arg-type]


def derived_entries() -> list[Entry]:
    return _generic_entries() + _combination_entries() + _negation_entries() + _normal_entries()


def _generic_entries() -> list[Entry]:
    entries = [
        _rule(
            "cardiomegaly",
            (
                "m:cardiomegaly",
                "m:enlargement of the heart",
                "m:cardiac enlargement",
                "enlarged cardiac silhouette",
            ),
            _present("cardiomegaly"),
            labels={"Cardiomegaly": 1.0},
            system=3,
        ),
        _rule(
            "edema",
            ("m:pulmonary edema", "m:edema in both lungs", "m:vascular congestion with pulmonary edema"),
            _present("edema"),
            labels={"Edema": 1.0},
        ),
        _rule(
            "effusion",
            (
                "m:pleural effusion",
                "m:pleural fluid",
                "m:blunting of the costophrenic angle from pleural fluid",
            ),
            _any_of(FLUID_KINDS),
            labels={"Pleural Effusion": 1.0},
            system=2,
        ),
        _rule(
            "pneumonia",
            (
                "m:pneumonia",
                "focal consolidation compatible with pneumonia",
                "m:airspace disease reflecting pneumonia",
                "parenchymal opacity representing pneumonia",
            ),
            _present("pneumonia"),
            labels={"Pneumonia": 1.0},
        ),
        _rule(
            "pneumothorax",
            ("pneumothorax", "m:air in the pleural space", "visible pleural line from a pneumothorax"),
            _present("pneumothorax"),
            labels={"Pneumothorax": 1.0},
            system=2,
        ),
    ]
    for side in SIDES:
        entries += [
            _rule(
                f"effusion_{side}",
                ("{side} pleural effusion", "pleural effusion on the {side}", "m:{side}-sided pleural fluid"),
                _present("effusion", side),
                side=side,
                labels={"Pleural Effusion": 1.0},
                system=2,
            ),
            _rule(
                f"pneumothorax_{side}",
                ("{side} pneumothorax", "pneumothorax on the {side}", "{side}-sided pneumothorax"),
                _present("pneumothorax", side),
                side=side,
                labels={"Pneumothorax": 1.0},
                system=2,
            ),
            _rule(
                f"pneumonia_{side}",
                (
                    "m:pneumonia in the {side} lung",
                    "m:{side}-sided pneumonia",
                    "{side} lung consolidation from pneumonia",
                ),
                _present("pneumonia", side),
                side=side,
                labels={"Pneumonia": 1.0},
            ),
        ]
        entries += [
            _rule(
                f"pneumonia_{side}_{zone}",
                ("m:{where} pneumonia", "m:pneumonia in the {where}", "{where} infiltrate due to pneumonia"),
                _present("pneumonia", side, zone),
                side=side,
                zone=zone,
                labels={"Pneumonia": 1.0},
            )
            for zone in ZONES
        ]
    return entries


def _combination_entries() -> list[Entry]:
    return [
        _rule(
            "effusion_bilateral",
            (
                "p:bilateral pleural effusions",
                "m:pleural fluid on both sides",
                "p:effusions at both lung bases",
            ),
            lambda s: s.has("effusion", "right") and s.has("effusion", "left"),
            labels={"Pleural Effusion": 1.0},
            system=2,
        ),
        *(
            _rule(
                f"effusion_bilateral_{side}_larger",
                (
                    f"p:bilateral pleural effusions, {side} greater than {other}",
                    f"p:effusions on both sides, larger on the {side}",
                    f"p:asymmetric bilateral effusions, worse on the {side} than on the {other}",
                ),
                _larger_effusion(side, other),
                labels={"Pleural Effusion": 1.0},
                system=2,
            )
            for side, other in (("right", "left"), ("left", "right"))
        ),
        _rule(
            "pneumonia_multifocal",
            (
                "m:multifocal pneumonia",
                "p:multifocal opacities compatible with pneumonia",
                "m:pneumonia in several lobes",
            ),
            lambda s: s.count("pneumonia") > 1,
            labels={"Pneumonia": 1.0, "Lung Opacity": 1.0},
        ),
        _rule(
            "cardiomegaly_with_edema",
            (
                "m:cardiomegaly with pulmonary edema",
                "enlarged heart and pulmonary edema",
                "m:cardiac enlargement accompanied by pulmonary edema",
            ),
            lambda s: s.has("cardiomegaly") and s.has("edema"),
            labels={"Cardiomegaly": 1.0, "Edema": 1.0},
            system=6,
        ),
        _rule(
            "edema_with_effusion",
            (
                "m:pulmonary edema with pleural effusion",
                "m:edema accompanied by pleural fluid",
                "combination of pulmonary edema and pleural effusion",
            ),
            lambda s: s.has("edema") and s.any_of(FLUID_KINDS),
            labels={"Edema": 1.0, "Pleural Effusion": 1.0},
            system=6,
        ),
        _rule(
            "heart_failure",
            (
                "constellation of findings suggesting volume overload with an enlarged heart, edema and effusion",
                "picture of decompensated heart failure",
                "m:congestive heart failure with pleural effusion",
            ),
            lambda s: s.has("cardiomegaly") and s.has("edema") and s.has("effusion"),
            labels={"Cardiomegaly": 1.0, "Edema": 1.0, "Pleural Effusion": 1.0},
            system=6,
        ),
        _rule(
            "tubes_in_position",
            (
                "the monitoring and support devices are in standard position",
                "lines and tubes are in appropriate position",
                "the position of the support devices is unremarkable",
            ),
            lambda s: s.any_of(TUBE_KINDS) and not s.any_of(MISPLACED_KINDS),
            family="statement",
            labels={"Support Devices": 1.0},
            system=0,
        ),
    ]


def _negation_entries() -> list[Entry]:
    def absent(
        name: str, kinds: Iterable[str], texts: Sequence[str], columns: Sequence[str], system: int
    ) -> Entry:
        kinds = frozenset(kinds)
        return _rule(
            name,
            texts,
            _none_of(kinds),
            family="negation",
            labels=dict.fromkeys(columns, 0.0),
            system=system,
        )

    fluid, air = FLUID_KINDS, {"pneumothorax"}
    return [
        absent(
            "no_cardiomegaly", {"cardiomegaly"}, ("cardiomegaly", "cardiac enlargement"), ["Cardiomegaly"], 3
        ),
        absent(
            "no_edema",
            {"edema"},
            ("pulmonary edema", "overt edema", "interstitial or alveolar edema"),
            ["Edema"],
            1,
        ),
        absent(
            "no_effusion",
            fluid,
            ("pleural effusion", "effusion", "sizable pleural fluid"),
            ["Pleural Effusion"],
            2,
        ),
        absent(
            "no_pneumonia",
            {"pneumonia"},
            ("pneumonia", "acute pneumonia", "opacity concerning for pneumonia"),
            ["Pneumonia"],
            1,
        ),
        absent("no_pneumothorax", air, ("pneumothorax", "visible pneumothorax"), ["Pneumothorax"], 2),
        absent(
            "no_consolidation",
            CONSOLIDATION_KINDS,
            ("focal consolidation", "lobar consolidation", "confluent airspace consolidation"),
            ["Consolidation"],
            1,
        ),
        absent(
            "no_effusion_or_pneumothorax",
            fluid | air,
            (
                "pleural effusion or pneumothorax",
                "pneumothorax or pleural effusion",
                "effusion or pneumothorax",
            ),
            ["Pleural Effusion", "Pneumothorax"],
            2,
        ),
        absent(
            "no_consolidation_effusion_or_pneumothorax",
            CONSOLIDATION_KINDS | fluid | air,
            (
                "focal consolidation, pleural effusion or pneumothorax",
                "consolidation, effusion, or pneumothorax",
                "focal consolidation, effusion, or visible pneumothorax",
            ),
            ["Consolidation", "Pleural Effusion", "Pneumothorax"],
            1,
        ),
        absent(
            "no_edema_or_effusion",
            fluid | {"edema"},
            ("pulmonary edema or pleural effusion", "edema or effusion"),
            ["Edema", "Pleural Effusion"],
            1,
        ),
        absent(
            "no_pneumonia_or_edema",
            {"pneumonia", "edema"},
            ("pneumonia or pulmonary edema", "pneumonia or edema", "pulmonary edema or pneumonia"),
            ["Pneumonia", "Edema"],
            1,
        ),
        absent(
            "no_nodule",
            {"nodule", "mass", "granuloma", "cavity", "miliary"},
            ("pulmonary nodule or mass", "suspicious nodule", "nodules or masses"),
            ["Lung Lesion"],
            1,
        ),
        absent(
            "no_fracture",
            {"rib_fracture", "clavicle_fracture"},
            ("displaced fracture", "acute fracture", "rib or clavicle fracture"),
            ["Fracture"],
            5,
        ),
        absent(
            "no_free_air", {"free_air"}, ("free air under the diaphragm", "free intraperitoneal air"), [], 6
        ),
    ]


def _normal_entries() -> list[Entry]:
    def statement(name: str, texts: Sequence[str], rule: Rule, system: int, **o: object) -> Entry:
        return _rule(name, texts, rule, family="statement", system=system, **o)

    return [
        statement(
            "normal_heart_size",
            (
                "the heart is normal in size",
                "heart size is within normal limits",
                "the cardiac silhouette is normal",
                "the size of the cardiac silhouette is normal",
            ),
            _none_of({"cardiomegaly"}),
            3,
            labels={"Cardiomegaly": 0.0},
        ),
        statement(
            "lungs_clear",
            ("the lungs are clear", "both lungs are clear", "lungs are clear of focal opacity"),
            _none_of(LUNG_KINDS),
            1,
        ),
        statement(
            "normal_vasculature",
            (
                "the pulmonary vasculature is normal",
                "pulmonary vascularity is within normal limits",
                "the pulmonary vessels are not engorged",
            ),
            _none_of({"edema"}),
            1,
        ),
        statement(
            "free_angles",
            ("the costophrenic angles are free of fluid", "both pleural recesses are free of fluid"),
            _none_of(FLUID_KINDS),
            2,
            labels={"Pleural Effusion": 0.0},
        ),
        statement(
            "normal_mediastinum",
            (
                "the mediastinal contours are unremarkable",
                "the mediastinal silhouette is normal",
                "mediastinal contours are within normal limits",
            ),
            _none_of(MEDIASTINAL_KINDS),
            4,
            labels={"Enlarged Cardiomediastinum": 0.0},
        ),
        statement(
            "normal_hila",
            ("the hilar contours are normal", "the hila are unremarkable", "hilar structures are normal"),
            _none_of({"hilar_enlargement"}),
            4,
        ),
        statement(
            "bones_intact",
            (
                "the osseous structures are unremarkable",
                "the imaged bones are intact",
                "no acute osseous abnormality is identified in the visualized skeleton",
            ),
            _none_of(BONE_KINDS),
            5,
        ),
        statement(
            "low_volumes",
            ("lung volumes are low", "the lung volumes remain low", "inspiratory effort is poor"),
            lambda s: s.low_volumes,
            1,
        ),
        statement(
            "well_expanded",
            ("the lungs are well expanded", "lung volumes are normal", "both lungs are well inflated"),
            lambda s: not s.low_volumes,
            1,
        ),
        statement(
            "no_acute_process",
            (
                "no acute cardiopulmonary process",
                "no acute intrathoracic abnormality",
                "there is no acute cardiopulmonary abnormality",
            ),
            _none_of(ACUTE_KINDS),
            6,
        ),
        statement(
            "normal_chest",
            (
                "normal chest radiograph",
                "normal radiographic examination of the chest",
                "the chest is normal",
            ),
            lambda s: not s.findings and not s.low_volumes,
            6,
        ),
        statement(
            "technique",
            (
                "the patient is slightly rotated",
                "this is a limited examination",
                "comparison is made to the prior study of ___",
            ),
            lambda s: True,
            6,
        ),
    ]
