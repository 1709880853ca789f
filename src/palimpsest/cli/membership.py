"""`palimpsest membership`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from palimpsest.auditing import given, truth
from palimpsest.auditing.membership import membership
from palimpsest.auditing.told_apart import MembershipOptions
from palimpsest.cli.shared import Device, image_shape, json_object, torch_device
from palimpsest.runs.journal import printable


@dataclass
class MembershipCommand:
    """Test given images: was the network trained on them?

    Compares how much of each image the change of the weights holds with the same for held-out images. Reconstructs
    nothing and takes seconds. Writes membership.csv (a row per image), membership.json and membership.html.

        palimpsest membership --out runs/membership --network mypackage.models:make --weights final.pt
            --initial start.pt --shape 3,32,32 --images suspects/ --held-out other/
    """

    out: Path
    """The folder to write into. One that holds another test is refused; the same command may be repeated."""
    network: str
    """Function that creates the network: package.module:factory or path/to/file.py:factory. Its code is executed."""
    weights: Path
    """The final weights: a .safetensors file, the index of its shards, or a state dict or checkpoint of torch."""
    shape: str
    """Channels, height and width of the images: 3,32,32."""
    images: str
    """The images to test: a folder, with or without sub-folders, or an .npz file with an array images."""
    held_out: str
    """Images of the same kind that were not trained on. 99 resolve 1 % false positives, 999 resolve 0.1 %."""
    network_args: str | None = None
    """Arguments of that function, as a JSON object: '{"num_classes": 10}'."""
    initial: Path | None = None
    """The initial weights, before training. Without them or checkpoints, little can be told."""
    checkpoints: tuple[Path, ...] = ()
    """Weights on the way, if known: files, folders, or patterns in quotes."""
    updates: tuple[Path, ...] = ()
    """Rounds of federated learning, to test one client: round-03-global.pt, round-03-client.pt and so on."""
    key: str | None = None
    """Entry of --weights to read, such as ema. If omitted: state_dict, model_state_dict, model, or the only one."""
    initial_key: str | None = None
    """The same for --initial."""
    mean: str = "0"
    """Mean subtracted from the images: a number, one per channel (0.5,0.4,0.4), or an .npy file."""
    std: str = "1"
    """Standard deviation by which they were divided, in the same forms."""
    options: Annotated[MembershipOptions, tyro.conf.arg(name="")] = field(default_factory=MembershipOptions)
    device: Device = "auto"
    """Device to compute on. auto: CUDA if available."""

    def run(self) -> None:
        shape = image_shape(self.shape)
        mean, std = truth.scale(self.mean, self.std, shape)
        images, held_out = given.load(
            self.images, self.held_out, image_shape=shape, labelled=self.options.loss is not None
        )
        found = membership(
            self.network,
            self.weights,
            images,
            held_out,
            network_args=None if self.network_args is None else json_object(self.network_args, "--network-args"),
            initial=self.initial,
            checkpoints=self.checkpoints or None,
            updates=self.updates or None,
            key=self.key,
            initial_key=self.initial_key,
            mean=mean,
            std=std,
            device=torch_device(self.device),
            out=self.out,
            **vars(self.options),
        )
        print(found.sentence, printable(f"The page is {self.out / 'membership.html'}"), sep="\n")
