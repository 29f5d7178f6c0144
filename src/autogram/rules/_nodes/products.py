"""Nodes of matrix products: the cotangent times the saved tensor of the other side."""

from __future__ import annotations

from autogram.rules._nodes.registry import NodeInput, NodeRecipe, addend_at, of_nodes
from autogram.rules._recipe import POSITIONS, Formula, formula_of
from autogram.rules.linear import blocks_of_stack

# By operation: for each input, the einsum of the cotangent and the saved tensor, and its field.
# A first `None` marks operations that add a product, times alpha, to an input, times beta.
_EQUATIONS: dict[str, tuple[tuple[str, str] | None, ...]] = {
    "Mm": (("op,ip->oi", "mat2"), ("op,oi->ip", "self")),
    "Bmm": (("sop,sip->soi", "mat2"), ("sop,soi->sip", "self")),
    "Mv": (("o,i->oi", "vec"), ("o,oi->i", "self")),
    "Dot": ((",i->i", "tensor"), (",i->i", "self")),
    "Addmm": (None, ("op,ip->oi", "mat2"), ("op,oi->ip", "mat1")),
    "Baddbmm": (None, ("sop,sip->soi", "batch2"), ("sop,soi->sip", "batch1")),
    "Addbmm": (None, ("op,sip->soi", "batch2"), ("op,soi->sip", "batch1")),
    "Addmv": (None, ("o,i->oi", "vec"), ("o,oi->i", "mat")),
    "Addr": (None, ("op,p->o", "vec2"), ("op,o->p", "vec1")),
}


@of_nodes(*_EQUATIONS, holds_for_complex=True)
def _product(read: NodeInput) -> NodeRecipe:
    """Both sides of a product, and the input that it is added to."""
    sides = _EQUATIONS[read.operation]
    side = sides[read.position]
    if side is None:
        return addend_at(read, read.number("beta"))
    equation, field = side
    scale = read.number("alpha") if sides[0] is None else 1
    return NodeRecipe(formula_of(equation, scale=scale, is_complex=read.is_complex), (field,))


@of_nodes("Vdot")
def _vdot(read: NodeInput) -> NodeRecipe:
    """Both sides of an inner product of real vectors."""
    return NodeRecipe(formula_of(",i->i"), (("other", "self")[read.position],))


@of_nodes("Linear", holds_for_complex=True)
def _linear(read: NodeInput) -> NodeRecipe | None:
    """``F.linear`` on devices that compute it with one kernel."""
    t, is_complex = POSITIONS[: len(read.result) - 1], read.is_complex
    if read.position == 2:
        return NodeRecipe(formula_of(f"{t}o->o", is_complex=is_complex))
    if read.position == 1 and len(read.shape) == 2:
        return NodeRecipe(formula_of(f"{t}o,{t}i->oi", is_complex=is_complex), ("input",))
    return None


@of_nodes("Trilinear", holds_for_complex=True)
def _trilinear(read: NodeInput) -> NodeRecipe | None:
    """The product of three tensors, each without some dimensions, as used by ``F.bilinear``."""
    left_out = [read.number(f"expand{i}") for i in (1, 2, 3)]
    labels = POSITIONS[: len(read.shape) + len(left_out[read.position])]
    output, *terms = (
        "".join([label for dim, label in enumerate(labels) if dim not in dims])
        for dims in (read.number("sumdim"), *left_out)
    )
    target = terms.pop(read.position)
    factors = ",".join((output, *terms))
    if not set(target) <= set(factors):
        return None  # summed over and in this tensor alone
    fields = [field for i, field in enumerate(("i1", "i2", "i3")) if i != read.position]
    return NodeRecipe(formula_of(f"{factors}->{target}", is_complex=read.is_complex), tuple(fields))


@of_nodes("GroupedMm")
def _grouped_mm(read: NodeInput) -> NodeRecipe | None:
    """A matrix for each range of rows."""
    if read.position != 1 or (len(read.result), len(read.shape)) != (2, 3):
        return None
    return NodeRecipe(Formula("t-", blocks_of_stack), ("self", "offs"))
