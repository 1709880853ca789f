"""The published methods as they were published: the peers' own trainings, read by their own recipes and by ours.

    python experiments/published --setting haim-cifar10 --seed 1

Every column of a setting reads the same weights. Networks are trained once, and kept in `runs/published`. Each
reconstruction writes one file in `experiments/results/published-<setting>`, and a run that is started again goes on
where it was.
"""
