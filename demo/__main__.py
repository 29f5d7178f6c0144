"""Uses of Jacobian products, in six acts with pictures: ``python -m demo --help``."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from demo import control, equation, labels, times, toy
from demo.digits import Images, load_images, make_classifier
from demo.picture import draw_control, draw_training
from demo.probe import Look, Probe
from demo.table import make_notes, make_table
from demo.training import GradientDescent, JacobianDescent, Training

BATCH_SIZE = 32
LEARNING_RATE = 0.2
LARGE_LEARNING_RATE = 0.4  # the best for SGD among 0.05, 0.1, 0.2, 0.4; at 0.8 it diverges
CONTROL_RATES = (0.05, 0.1, 0.15, 0.2)
CONTROL_WEIGHTS = (1.5, 2.0)
CONTROL_SEEDS = (0, 1, 2)


def main() -> None:
    """Run the acts that the command line asks for, and save their pictures."""
    arguments = parse_arguments()
    torch.set_num_threads(1)  # the operations are too small to gain from a second thread
    console = Console()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name in arguments.acts:
        console.rule(ACTS[name].__doc__ or name)
        figure = ACTS[name](console, arguments)
        if arguments.short:
            console.print("This was a short run: its numbers only show that everything works.")
        path = arguments.output / f"{name}.png"
        figure.savefig(path, dpi=120, bbox_inches="tight", pad_inches=0.1)
        console.print(f"Picture saved to {path}\n", soft_wrap=True)


def show_toy(console: Console, arguments: Namespace) -> Figure:
    """Two losses that conflict."""
    with console.status("descending from five starts, with the mean and with UPGrad"):
        courses = toy.compare(40 if arguments.short else 1500)
    console.print(toy.make_note(courses))
    return toy.draw(courses)


def show_labels(console: Console, arguments: Namespace) -> Figure:
    """Wrong labels, found with gradients."""
    with console.status("training on digits, a tenth of them with wrong labels"):
        found = labels.search(1 if arguments.short else 6, arguments.seed)
    console.print(labels.make_note(found))
    return labels.draw(found)


def show_equation(console: Console, arguments: Namespace) -> Figure:
    """A differential equation, solved with Gauss-Newton steps and with Adam."""
    with console.status("solving Poisson's equation with Gauss-Newton steps and with Adam"):
        found = equation.solve(2 if arguments.short else 50)
    console.print(equation.make_note(found))
    return equation.draw(found)


def show_times(console: Console, arguments: Namespace) -> Figure:
    """The time of a step on this machine."""
    warm, rounds = (1, 1) if arguments.short else (times.N_WARM, 15)
    with make_progress(console) as progress:
        total = len(times.MODELS) * (warm + rounds)
        task = progress.add_task("steps of each kind", total=total)
        found = times.measure(warm, rounds, lambda: progress.advance(task))
    console.print(times.make_note(found))
    return times.draw(found)


def show_tasks(console: Console, arguments: Namespace) -> Figure:
    """Two competing tasks: SGD with its rate tuned, and Jacobian descent, with a few seeds."""
    rates, seeds = (CONTROL_RATES, CONTROL_SEEDS) if not arguments.short else ((0.15,), (0,))
    count = len(rates) + (2 + len(CONTROL_WEIGHTS)) * len(seeds)
    with make_progress(console, unit="trainings") as progress:
        task = progress.add_task("classes and drawings", total=count)
        found = control.compare(
            rates,
            CONTROL_WEIGHTS,
            seeds,
            1 if arguments.short else 30,
            lambda: progress.advance(task),
        )
    console.print(control.make_table(found))
    console.print(control.make_note(found))
    return draw_control(found)


def show_digits(console: Console, arguments: Namespace) -> Figure:
    """Where the gain is small: digits, all of which a network can learn."""
    training_images, test_images = load_images(arguments.seed)
    model = make_classifier(arguments.seed)
    probe = Probe(model, training_images, test_images)
    trainings = (
        GradientDescent(model, LEARNING_RATE),
        GradientDescent(model, LARGE_LEARNING_RATE),
        JacobianDescent(model, LEARNING_RATE),
    )
    n_epochs = 1 if arguments.short else arguments.epochs
    epochs = make_batches(len(training_images), n_epochs, arguments.seed)
    with make_progress(console) as progress:
        looks = train(trainings, training_images, epochs, probe, progress)
    console.print(make_table(trainings, looks))
    console.print(make_notes(len(probe.samples), n_epochs))
    names = [training.title for training in trainings]
    return draw_training(names, looks, epoch=max(1, n_epochs // 5))


ACTS: dict[str, Callable[[Console, Namespace], Figure]] = {
    "toy": show_toy,
    "labels": show_labels,
    "equation": show_equation,
    "times": show_times,
    "tasks": show_tasks,
    "digits": show_digits,
}


def parse_arguments() -> Namespace:
    """Read the command line."""
    parser = ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("acts", nargs="*", help=f"acts to run: {', '.join(ACTS)} (default: all)")
    parser.add_argument("--epochs", type=int, default=10, help="epochs of the act `digits`")
    parser.add_argument(
        "--short", action="store_true", help="run for a few seconds only, to see that it works"
    )
    parser.add_argument("--seed", type=int, default=0, help="seeds weights, split and batches")
    parser.add_argument("--output", type=Path, default=Path("build/demo"), help="picture folder")
    arguments = parser.parse_args()
    if unknown := set(arguments.acts) - set(ACTS):
        parser.error(
            f"there is no act {', '.join(sorted(unknown))}; pass some of {', '.join(ACTS)}"
        )
    arguments.acts = arguments.acts or list(ACTS)
    return arguments


def make_batches(n_images: int, n_epochs: int, seed: int) -> list[Sequence[Tensor]]:
    """Image indices of each batch of each epoch; a smaller last batch is dropped."""
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
    """Train all models on the same batches, and probe them before, between and after the epochs.

    The trainings take turns, step by step, so that other load on the machine slows all of them.

    Returns:
        For each training, its list of looks.
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


def make_progress(console: Console, unit: str = "steps") -> Progress:
    """A progress bar that counts steps, or another unit."""
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
