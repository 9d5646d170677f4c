"""Random numbers of torch's GPU generator as text: integer arithmetic on 32-bit words.

A call gives four numbers, which is most of the cost, so neighbouring lanes share it where they
are known to have the numbers of one call.
"""

from __future__ import annotations

from torchair.codegen import philox
from torchair.codegen.loops import Expr
from torchair.codegen.philox import FOUR, PhiloxLayout
from torchair.codegen.text.writer import Writer, f32


def is_run(position: Expr, axis: int, count: int) -> bool:
    """Whether a position is that along an axis and a multiple of `count`: then `count` neighbours
    from a multiple of it on have successive positions, which begin at one."""
    once, stack = 0, [position]
    while stack:
        x = stack.pop()
        if x.kind == "add":
            stack += x.args
        elif x.kind == "axis" and x.data == axis:
            once += 1
        elif x.kind == "mul":
            factors = [a.data for a in x.args if a.kind in ("const", "size")]
            if not any(isinstance(n, int) and n % count == 0 for n in factors):
                return False
        elif x.kind not in ("const", "size") or not isinstance(x.data, int) or x.data % count:
            return False
    return once == 1


def written(
    w: Writer,
    seed: str,
    offset: str,
    position: str,
    layout: PhiloxLayout,
    lanes: int,
    together: int = 1,
) -> str:
    """The numbers for the elements at these positions: a float, or a vector of them for `lanes`
    positions, of which `together` neighbours are successive, the first one a multiple of it."""
    calls = _Calls(w, seed, offset, layout)
    if not lanes:
        return calls.numbers(position, 1)[0]
    together = min(together, layout.vector if layout.vector > 1 else 1)
    made = "poison"
    for first in range(0, lanes, together):
        place = w(f"extractelement <{lanes} x i64> {position}, i64 {first}")
        for k, x in enumerate(calls.numbers(place, together), first):
            made = w(f"insertelement <{lanes} x float> {made}, float {x}, i64 {k}")
    return made


class _Calls:
    """Calls of one generator."""

    def __init__(self, w: Writer, seed: str, offset: str, layout: PhiloxLayout) -> None:
        self.w, self.layout = w, layout
        self._type = "i32" if layout.elements < 1 << 31 else "i64"
        high = w(f"lshr i64 {seed}, 32")
        self._keys = [w(f"trunc i64 {x} to i32") for x in (seed, high)]
        self._first = w(f"lshr i64 {offset}, 2")

    def numbers(self, position: str, count: int) -> list[str]:
        """The numbers of successive elements of one call, from this one on."""
        w, t = self.w, self._type
        place = position if t == "i64" else w(f"trunc i64 {position} to i32")
        thread, call, number = self._place(place)
        words = self._words(thread, call)
        found = []
        for k in range(count):
            at = number if count == 1 else w(f"add {t} {number}, {k}")
            known = count == FOUR or (count == 2 and self.layout.vector == 2)
            found.append(self._uniform(words[k] if known else self._chosen(words, at)))
        return found

    def _place(self, place: str) -> tuple[str, str, str]:
        """Thread, call and number of an element."""
        w, t, layout = self.w, self._type, self.layout
        one_turn = layout.elements <= layout.turn
        turn = "0" if one_turn else w(f"udiv {t} {place}, {layout.turn}")
        if layout.vector == 1:
            few = layout.elements <= layout.threads
            thread = place if few else w(f"urem {t} {place}, {layout.threads}")
            group = "0" if few else w(f"udiv {t} {place}, {layout.threads}")
            return thread, turn, group if few else w(f"and {t} {group}, {FOUR - 1}")
        thread = w(f"lshr {t} {place}, {layout.vector.bit_length() - 1}")
        if not one_turn:
            thread = w(f"urem {t} {thread}, {layout.threads}")
        number = w(f"and {t} {place}, {min(FOUR, layout.vector) - 1}")
        if layout.calls == 1:
            return thread, turn, number
        which = w(f"and {t} {w(f'lshr {t} {place}, 2')}, {layout.calls - 1}")
        call = which if one_turn else w(f"add {t} {w(f'mul {t} {turn}, {layout.calls}')}, {which}")
        return thread, call, number

    def _words(self, thread: str, call: str) -> list[str]:
        """The four words of a call."""
        w = self.w
        counter = self._first
        if call != "0":
            wide = call if self._type == "i64" else w(f"zext i32 {call} to i64")
            counter = w(f"add i64 {counter}, {wide}")
        low, high = self._halves(counter)
        sequence = thread if self._type == "i32" else w(f"trunc i64 {thread} to i32")
        words, keys = [low, high, sequence, "0"], list(self._keys)
        for turn in range(philox.ROUNDS):
            (low_a, high_a), (low_b, high_b) = (
                self._product(words[2 * k], philox.MULTIPLIERS[k]) for k in (0, 1)
            )
            words = [
                self._mixed(high_b, words[1], keys[0]),
                low_b,
                self._mixed(high_a, words[3], keys[1]),
                low_a,
            ]
            if turn + 1 < philox.ROUNDS:
                keys = [
                    w(f"add i32 {key}, {step - 2**32}")  # as a number with a sign
                    for key, step in zip(keys, philox.KEY_STEPS, strict=True)
                ]
        return words

    def _product(self, word: str, factor: int) -> tuple[str, str]:
        wide = self.w(f"mul i64 {self.w(f'zext i32 {word} to i64')}, {factor}")
        return self._halves(wide)

    def _halves(self, wide: str) -> tuple[str, str]:
        low = self.w(f"trunc i64 {wide} to i32")
        return low, self.w(f"trunc i64 {self.w(f'lshr i64 {wide}, 32')} to i32")

    def _mixed(self, a: str, b: str, key: str) -> str:
        return self.w(f"xor i32 {self.w(f'xor i32 {a}, {b}')}, {key}")

    def _chosen(self, words: list[str], number: str) -> str:
        """The word of this number."""
        w, t = self.w, self._type
        if number == "0":
            return words[0]
        odd = w(f"icmp ne {t} {w(f'and {t} {number}, 1')}, 0")
        low, high = (w(f"select i1 {odd}, i32 {words[k + 1]}, i32 {words[k]}") for k in (0, 2))
        upper = w(f"icmp uge {t} {number}, 2")
        return w(f"select i1 {upper}, i32 {high}, i32 {low}")

    def _uniform(self, bits: str) -> str:
        """Above 0 and up to 1. The product is exact, so one rounding or two make no difference."""
        w = self.w
        scaled = w(f"fmul float {w(f'uitofp i32 {bits} to float')}, {f32(2.0**-32)}")
        return w(f"fadd float {scaled}, {f32(2.0**-33)}")
