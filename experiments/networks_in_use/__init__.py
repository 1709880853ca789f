"""Networks as people train and fine-tune them, each trained by plain torch and read with its initial weights.

    python experiments/networks_in_use [--rows …] [--seeds …]      writes experiments/results/networks-in-use
    python experiments/networks_in_use --table                     prints the results

How a network was trained decides how well it can be read. He's start and a small learning rate keep the convolutional
network close to its linearisation, so it is easier to read. One row has torch's default start and a larger rate.
"""
