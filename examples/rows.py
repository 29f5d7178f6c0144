"""Aggregators that need rows, served one parameter at a time.

*GradDrop* and *TrimmedMean* treat each coordinate separately. Given one parameter's columns after
the other, they return what they return for the whole matrix (GradDrop draws other random numbers).
Memory never holds more than one parameter's rows.

*ConFIG* is different: it normalises whole rows, so that calling it for each parameter would be
another method. But its result is a combination of the rows, and the weights follow from the
Gramian. It therefore needs no rows.

Chen et al., Just Pick a Sign, 2020, arXiv:2010.06808 (GradDrop); Yin et al., Byzantine-Robust
Distributed Learning, 2018, arXiv:1803.01498 (TrimmedMean); Liu, Chu and Thuerey, ConFIG, 2024,
arXiv:2408.11104.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchjd.aggregation import GradDrop, TrimmedMean

from autogram import Engine, Jacobian
from examples.problem import draw, is_short, make_model
from examples.showing import print_table


def aggregate_by_parameter(
    jacobian: Jacobian, aggregator: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """The result of an aggregator that treats each coordinate separately."""
    aggregated = {}
    for name in jacobian.names:
        rows = jacobian.rows(slice(None), [name])[name]  # (m, *parameter)
        aggregated[name] = aggregator(rows.flatten(1)).view(rows.shape[1:])
    return aggregated


def config_weights(gramian: Tensor) -> Tensor:
    """The weights of ConFIG, with equal preferences, from the Gramian ``(m, m)``.

    With U the rows divided by their norms and C = U U^T, the direction is d = U^+ 1 = U^T C^+ 1,
    and its length the sum of the rows' projections on it. Rows of zeros, from samples whose
    loss is zero, are ignored, as are rows too small for an exact square.
    """
    squares = gramian.diagonal()
    finfo = torch.finfo(gramian.dtype)
    weights = torch.zeros_like(squares)
    some = (squares > finfo.tiny / finfo.eps).nonzero().squeeze(1)
    if len(some):
        norms = squares[some].sqrt()
        cosines = gramian[some][:, some] / torch.outer(norms, norms)
        c = torch.linalg.pinv(cosines, hermitian=True).sum(1)
        length = norms @ cosines @ c / (c @ cosines @ c)
        weights[some] = length * c / norms
    return weights


def train(step_of: Callable[[Engine, nn.Module, Tensor], None], steps: int) -> float:
    """Trains, and returns the mean loss after it."""
    torch.manual_seed(0)
    model = make_model()
    engine = Engine(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)  # with twice the rate, it is unstable
    for _ in range(steps):
        step_of(engine, model, draw(16).losses(model))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return float(draw(1000).losses(model).mean())


def by_rows(aggregator: Callable[[Tensor], Tensor]) -> Callable[[Engine, nn.Module, Tensor], None]:
    """A step with an aggregator that receives one parameter at a time."""

    def step(engine: Engine, model: nn.Module, losses: Tensor) -> None:
        gradients = aggregate_by_parameter(engine.jacobian(losses), aggregator)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]

    return step


def by_weights(engine: Engine, model: nn.Module, losses: Tensor) -> None:
    """A step of ConFIG."""
    del model
    engine.backward(losses, config_weights)


if __name__ == "__main__":
    steps = 20 if is_short(__doc__) else 500
    cases = {
        ("GradDrop", "rows, by parameter"): by_rows(GradDrop()),
        ("TrimmedMean", "rows, by parameter"): by_rows(TrimmedMean(2)),
        ("ConFIG", "the Gramian"): by_weights,
    }
    rows = [(*names, f"{train(step_of, steps):.3f}") for names, step_of in cases.items()]
    print_table(("aggregator", "is given", "mean loss"), rows)
