"""Assembles the kernel file around generated Triton kernels: layouts, allocation, launch."""

from agent.proposers.playbook.cpp_file import allocate, doc, dtypes, prepare, read_symbols, signature, stride_value
from agent.proposers.playbook.nests import Plan, Tensor, constant_names, out_names, stride_names
from agent.proposers.playbook.triton import NestPrinter

TEMPLATE = '''"""{doc}"""

import torch
import triton
import triton.language as tl
{libdevice}
DTYPES = {dtypes}
TUNABLES = {tunables}
{constants}


{kernels}

{helpers}
def kernel_fn({signature}):
{body}
'''
LIBDEVICE = "from triton.language.extra import libdevice\n"
IN_ORDER = '''
def _in_order(x, order):
    """x, copied if its memory does not follow `order` (slowest dimension first) without gaps."""
    if x.permute(order).is_contiguous():
        return x
    back = sorted(range(len(order)), key=order.__getitem__)
    return x.permute(order).contiguous().permute(back)

'''
ELEMENTS_PER_PROGRAM = 2048


def triton_file(plan: Plan) -> str:
    """The whole kernel file."""
    names = ["kernel"] if len(plan.nests) == 1 else [f"kernel{n}" for n in range(len(plan.nests))]
    printers = [NestPrinter(plan, nest, name) for nest, name in zip(plan.nests, names, strict=True)]
    kernels = "\n\n\n".join(printer.text() for printer in printers)
    body = [line for tensor in plan.inputs for line in _prepared(tensor)]
    body += read_symbols(plan)
    body += [f"{name} = {stride_value(plan, name)}" for name in stride_names(plan)]
    device = f", device={plan.inputs[0].name}.device"
    for name, tensor in zip(out_names(plan), plan.outputs, strict=True):
        body.append(f"{name} = {allocate(tensor, device)}")
    for printer in printers:
        body += launch(plan, printer)
    table = tunables(plan)
    permuted = any("_in_order" in line for line in body)
    return TEMPLATE.format(
        doc=doc(plan.target, "one fused Triton kernel" if len(printers) == 1 else "fused Triton kernels"),
        libdevice=LIBDEVICE if "libdevice." in kernels else "",
        dtypes=dtypes(plan.target),
        tunables="{" + ", ".join(f'"{name}": {choices}' for name, choices in table.items()) + "}",
        constants="\n".join(f'{name} = TUNABLES["{name}"][0]' for name in table),
        kernels=kernels,
        helpers=IN_ORDER if permuted else "",
        signature=signature(plan.target),
        body="\n".join("    " + line for line in [*body, f"return {', '.join(out_names(plan))}"]),
    )


def _prepared(tensor: Tensor) -> list[str]:
    lines = prepare(tensor)
    return [*lines, f"{tensor.name} = torch.view_as_real({tensor.name})"] if tensor.paired else lines


def tunables(plan: Plan) -> dict[str, list[int]]:
    """Warps always; the columns of a program only where it needs no whole row."""
    table = {"ELEMENTS": [ELEMENTS_PER_PROGRAM, 1024, 4096, 8192], "WARPS": [4, 8, 2]}
    if all(nest.reductions for nest in plan.nests):
        table["WARPS"] = [4, 8, 2, 16]
    return table


def launch(plan: Plan, printer: NestPrinter) -> list[str]:
    """Python lines that launch one kernel over its rows and columns."""
    rows, columns = printer.rows.text, printer.columns.text
    arguments = ", ".join(_argument(plan, name) for name in printer.parameters())
    if printer.flat:
        return [
            f"count = {columns}",
            "if count:",
            f"    {printer.name}[(triton.cdiv(count, ELEMENTS),)]({arguments}, BLOCK=ELEMENTS, num_warps=WARPS)",
        ]
    whole = "triton.next_power_of_2(max(1, columns))"
    blocks = "" if printer.whole_row else " * triton.cdiv(columns, block)"
    return [
        f"rows, columns = {rows}, {columns}",
        f"block = {whole if printer.whole_row else f'min(ELEMENTS, {whole})'}",
        "height = max(1, min(triton.next_power_of_2(max(1, rows)), ELEMENTS // block))",
        f"grid = (triton.cdiv(rows, height){blocks},)",
        "if rows:" if printer.whole_row else "if rows and columns:",
        f"    {printer.name}[grid]({arguments}, ROWS=height, BLOCK=block, num_warps=WARPS)",
    ]


def _argument(plan: Plan, parameter: str) -> str:
    name = parameter.removesuffix("_ptr")
    if parameter in (*plan.symbols, *stride_names(plan), *constant_names(plan)):
        return parameter
    return name
