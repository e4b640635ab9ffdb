"""`klbench selftest`: planted faults with known truth on live servers, and how right the answers are.

    plan.py     which faults on which models, server configurations and workloads
    truth.py    what must be said of a fault in one measured run
    lab.py      one server: arms, measures, locates, experiments, judges, checks that it is clean again
    document.py klbench.selftest/1: what was done, resumed from its own file
    drive.py    works the plan off, one server after the other

The answers are those that a user gets: the runs, findings, experiments and verdicts of an ordinary session.
"""
