"""The paper's experiments, each as published and as we do it, with every control.

An experiment is a TOML file in this folder. It consists of parts, one for each column, variant, number of candidates
and seed. A part that has been run is one JSON file; the pages are built from these files.

    python experiments/reproduce ntk-cifar10            run the parts whose files are missing, and build the pages
    python experiments/reproduce ntk-cifar10 --pages    build the pages
"""
