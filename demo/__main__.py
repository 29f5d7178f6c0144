"""Train a classifier of digits twice, compare, and save a picture: ``python -m demo --help``."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from demo.control import compare as compare_tasks
from demo.control import make_note as make_note_on_tasks
from demo.control import make_table as make_table_of_tasks
from demo.digits import Images, load_images, make_classifier
from demo.picture import save_courses, save_picture, save_tasks
from demo.probe import Look, Probe
from demo.table import make_notes, make_table, make_table_of_steps
from demo.training import (
    FusedJacobianDescent,
    GradientDescent,
    JacobianDescent,
    TorchjdDescent,
    Training,
)
from examples.physics import compare

BATCH_SIZE = 32
LEARNING_RATE = 0.2
LARGE_LEARNING_RATE = 0.4  # the best for SGD among 0.05, 0.1, 0.2, 0.4; at 0.8 it diverges
CONTROL_RATES = (0.05, 0.1, 0.15, 0.2)
CONTROL_WEIGHTS = (1.5, 2.0)
CONTROL_SEEDS = (0, 1, 2)
N_CONTROL_EPOCHS = 30
N_EPOCHS = 10
N_EPOCHS_SHORT = 2
LARGE_BATCH_SIZE = 256
N_LARGE_STEPS = 14
N_EQUATION_STEPS = 50


def main() -> None:
    """Run the demo with the arguments of the command line."""
    arguments = parse_arguments()
    torch.set_num_threads(1)  # the operations are too small to gain from a second thread
    console = Console()

    training_images, test_images = load_images(arguments.seed)
    model = make_classifier(arguments.seed)
    probe = Probe(model, training_images, test_images)
    trainings = (
        GradientDescent(model, LEARNING_RATE),
        GradientDescent(model, LARGE_LEARNING_RATE),
        JacobianDescent(model, LEARNING_RATE),
    )

    epochs = make_batches(len(training_images), arguments.epochs, arguments.seed)
    with make_progress(console) as progress:
        looks = train(trainings, training_images, epochs, probe, progress)

    console.print(make_table(trainings, looks))
    console.print(make_notes(len(probe.samples), arguments.epochs), style="dim")
    if arguments.epochs > N_EPOCHS_SHORT:
        console.print(make_table_of_steps(take_large_steps(model, training_images, console)))
    names = [training.title for training in trainings]
    save_picture(arguments.output, names, looks, epoch=max(1, arguments.epochs // 5))
    console.print(f"The picture is in {arguments.output}", soft_wrap=True)
    if arguments.epochs > N_EPOCHS_SHORT:
        take_control(arguments.output.with_stem(f"{arguments.output.stem}_tasks"), console)
        solve_equation(arguments.output.with_stem(f"{arguments.output.stem}_physics"), console)


def take_control(output: Path, console: Console) -> None:
    """Two tasks that conflict: SGD with its rate tuned, and Jacobian descent, over some seeds."""
    count = len(CONTROL_RATES) + (2 + len(CONTROL_WEIGHTS)) * len(CONTROL_SEEDS)
    with make_progress(console, unit="trainings") as progress:
        task = progress.add_task("classes and drawings", total=count)
        found = compare_tasks(
            CONTROL_RATES,
            CONTROL_WEIGHTS,
            CONTROL_SEEDS,
            N_CONTROL_EPOCHS,
            lambda: progress.advance(task),
        )
    console.print(make_table_of_tasks(found))
    console.print(make_note_on_tasks(found), style="dim")
    save_tasks(output, found)
    console.print(f"The picture is in {output}", soft_wrap=True)


def solve_equation(output: Path, console: Console) -> None:
    """The second act: a differential equation by Gauss-Newton steps, and by Adam."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with console.status("Solving Poisson's equation by Gauss-Newton steps, and by Adam"):
            courses = compare(N_EQUATION_STEPS)
    finally:
        torch.set_default_dtype(before)
    for name, course in courses.items():
        seconds, error = course[-1]
        console.print(f"{name}: relative error {error:.1e} after {seconds:.1f} s")
    save_courses(output, courses)
    console.print(
        "The same network finds the solution of Poisson's equation in a square, whose residuals at "
        "480 points are the objectives. Adam had twice the time, and a learning rate that was "
        f"tuned and falls to zero. The picture is in {output}",
        soft_wrap=True,
    )


def parse_arguments() -> Namespace:
    """Read the command line."""
    parser = ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("--epochs", type=int, default=N_EPOCHS, help="passes through the images")
    parser.add_argument(
        "--short",
        dest="epochs",
        action="store_const",
        const=N_EPOCHS_SHORT,
        help="only a few seconds, to see that everything works",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights, split and batches")
    parser.add_argument("--output", type=Path, default=Path("build/demo.png"), help="the picture")
    return parser.parse_args()


def make_batches(n_images: int, n_epochs: int, seed: int) -> list[Sequence[Tensor]]:
    """For each epoch, the batches as positions of images; a last smaller batch is left out."""
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(n_images, generator=generator) for _ in range(n_epochs)]
    n_used = n_images - n_images % BATCH_SIZE
    return [order[:n_used].split(BATCH_SIZE) for order in orders]


def train(
    trainings: Sequence[Training],
    images: Images,
    epochs: Sequence[Sequence[Tensor]],
    probe: Probe,
    progress: Progress,
) -> list[list[Look]]:
    """Train all models on the same batches, and look at them before, between and after the epochs.

    The trainings take turns, step by step, so that what else the machine does slows all of them.

    Returns:
        For each training, its looks.
    """
    looks = [[probe.look(training.model)] for training in trainings]
    task = progress.add_task("training", total=sum(len(batches) for batches in epochs))
    for batches in epochs:
        for indices in batches:
            batch = images.select(indices)
            for training in trainings:
                training.step(batch)
            progress.advance(task)
        for training, own_looks in zip(trainings, looks, strict=True):
            own_looks.append(probe.look(training.model))
        accuracies = " and ".join(f"{own_looks[-1].accuracy:.1%}" for own_looks in looks)
        progress.update(task, description=f"test accuracy {accuracies}")
    return looks


def take_large_steps(model: nn.Module, images: Images, console: Console) -> list[Training]:
    """Some steps of each kind on a large batch, the same for all. They take turns, as above."""
    kinds = (GradientDescent, JacobianDescent, FusedJacobianDescent, TorchjdDescent)
    trainings: list[Training] = [kind(model, LEARNING_RATE) for kind in kinds]
    batch = images.select(torch.arange(LARGE_BATCH_SIZE))
    with make_progress(console) as progress:
        task = progress.add_task(f"steps on {LARGE_BATCH_SIZE} digits", total=N_LARGE_STEPS)
        for i in range(N_LARGE_STEPS):
            for training in trainings:
                if i < 2 or not isinstance(training, TorchjdDescent):  # whose steps take seconds
                    training.step(batch)
            progress.advance(task)
    return trainings


def make_progress(console: Console, unit: str = "steps") -> Progress:
    """A progress bar that counts steps, or what the unit says."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
        console=console,
    )


if __name__ == "__main__":
    main()
