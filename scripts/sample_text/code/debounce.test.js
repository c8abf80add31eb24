import assert from "node:assert/strict";
import { test, mock } from "node:test";

/** Call `fn` once, `wait` ms after the last of a burst of calls. */
export function debounce(fn, wait) {
  let timer = null;
  const later = (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      timer = null;
      fn(...args);
    }, wait);
  };
  later.cancel = () => {
    clearTimeout(timer);
    timer = null;
  };
  later.pending = () => timer !== null;
  return later;
}

test("a burst of calls runs the function once, with the last arguments", (t) => {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  const fn = mock.fn();
  const slow = debounce(fn, 100);
  slow(1);
  slow(2);
  slow(3);
  t.mock.timers.tick(99);
  assert.equal(fn.mock.callCount(), 0);
  t.mock.timers.tick(1);
  assert.equal(fn.mock.callCount(), 1);
  assert.deepEqual(fn.mock.calls[0].arguments, [3]);
});

test("a cancelled call never runs", (t) => {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  const fn = mock.fn();
  const slow = debounce(fn, 50);
  slow();
  assert.ok(slow.pending());
  slow.cancel();
  assert.ok(!slow.pending());
  t.mock.timers.tick(1000);
  assert.equal(fn.mock.callCount(), 0);
});

test("calls far apart run one by one", (t) => {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  const seen = [];
  const slow = debounce((value) => seen.push(value), 10);
  for (const value of ["a", "b", "c"]) {
    slow(value);
    t.mock.timers.tick(10);
  }
  assert.deepEqual(seen, ["a", "b", "c"]);
});
