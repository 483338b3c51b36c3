"""A small household in the format of ALFWorld's games: its own domain, problems and grammar."""

import json
from pathlib import Path

DOMAIN = """(define (domain household)
 (:requirements :strips :typing)
 (:types agent place thing)
 (:predicates (at ?a - agent ?l - place) (in ?o - thing ?l - place) (holds ?a - agent ?o - thing)
  (free ?a - agent) (wet ?l - place) (clean ?o - thing))
 (:action go :parameters (?a - agent ?from - place ?to - place)
  :precondition (at ?a ?from) :effect (and (at ?a ?to) (not (at ?a ?from))))
 (:action take :parameters (?a - agent ?o - thing ?l - place)
  :precondition (and (at ?a ?l) (in ?o ?l) (free ?a))
  :effect (and (holds ?a ?o) (not (in ?o ?l)) (not (free ?a))))
 (:action put :parameters (?a - agent ?o - thing ?l - place)
  :precondition (and (at ?a ?l) (holds ?a ?o))
  :effect (and (in ?o ?l) (free ?a) (not (holds ?a ?o))))
 (:action wash :parameters (?a - agent ?o - thing ?l - place)
  :precondition (and (at ?a ?l) (holds ?a ?o) (wet ?l)) :effect (clean ?o)))"""
PROBLEM = """(define (problem tidy) (:domain household)
 (:objects me - agent TABLE DRAWER SINK - place MUG SPOON LADLE - thing)
 (:init (at me TABLE) (free me) (in MUG TABLE) (in SPOON DRAWER) (in LADLE TABLE) (wet SINK))
 (:goal (and GOAL)))"""
NAMES = {
    "TABLE": "Table_bar__plus_01_dot_10_bar__plus_00_dot_90_bar__minus_00_dot_50",
    "DRAWER": "Drawer_bar__minus_00_dot_20_bar__plus_00_dot_60_bar__plus_00_dot_40",
    "SINK": "Sink_bar__minus_01_dot_90_bar__plus_00_dot_90_bar__plus_00_dot_10_bar_SinkBasin",
    "MUG": "Mug_bar__plus_01_dot_00_bar__plus_00_dot_95_bar__minus_00_dot_40",
    "SPOON": "Spoon_bar__minus_00_dot_25_bar__plus_00_dot_65_bar__plus_00_dot_40",
    "LADLE": "Spoon_bar__plus_00_dot_90_bar__plus_00_dot_95_bar__minus_00_dot_40",
}
"""Names with coordinates, as in the games of ALFWorld."""
GRAMMAR = '''grammar :: """
    {
        "intro": [{"rhs": "You are in a kitchen.\\n\\nYour task is to: TASK.\\n"}],
        "go.feedback": [{"rhs": "You arrive at {to.name}."}],
        "take.feedback": [{"rhs": "You pick up the {o.name} from the {l.name}."}],
        "put.feedback": [{"rhs": "You put the {o.name} in the {l.name}."}],
        "wash.feedback": [{"rhs": "You clean the {o.name} using the {l.name}."}]
    }
""";

action go { template :: "go to {to}"; feedback :: "#go.feedback#"; }
action take { template :: "take {o} from {l}"; feedback :: "#take.feedback#"; }
action put { template :: "put {o} in {l}"; feedback :: "#put.feedback#"; }
action wash { template :: "clean {o} with {l}"; feedback :: "#wash.feedback#"; }
'''
TASKS = {
    "pick_and_place_simple-Mug-None-Drawer-1": ("put the mug in the drawer", "(in MUG DRAWER)"),
    "pick_clean_then_place-Mug-None-Drawer-2": (
        "put a clean mug in the drawer",
        "(in MUG DRAWER) (clean MUG)",
    ),
}


def write_games(folder: Path) -> None:
    """Write two games for `train`, one for `valid_unseen`, and three that ALFWorld leaves out."""
    for split, kinds in (("train", list(TASKS)), ("valid_unseen", list(TASKS)[:1])):
        for kind in kinds:
            _write(folder / "json_2.1.1" / split / kind / "trial_1", *TASKS[kind])
    train, simple = folder / "json_2.1.1" / "train", next(iter(TASKS))
    _write(train / simple / "trial_0", "fly", "(wet TABLE)", is_solvable=False)
    for kind in ("pick_with_movable_recep-Mug-Pan-Sink-1", "pick_simple-MugSliced-None-Sink-1"):
        _write(train / kind / "trial_1", *TASKS[simple])


def _write(folder: Path, task: str, goal: str, *, is_solvable: bool = True) -> None:
    problem = PROBLEM.replace("GOAL", goal)
    for short, name in NAMES.items():
        problem = problem.replace(short, name)
    folder.mkdir(parents=True)
    game = {
        "pddl_domain": DOMAIN,
        "pddl_problem": problem,
        "grammar": GRAMMAR.replace("TASK", task),
        "solvable": is_solvable,
    }
    (folder / "game.tw-pddl").write_text(json.dumps(game))
