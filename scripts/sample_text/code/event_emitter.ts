/** A typed event emitter: names of events are keys of a map from names to what listeners get. */

type Listener<T> = (payload: T) => void;

export class Emitter<Events extends Record<string, unknown>> {
  private listeners: { [K in keyof Events]?: Set<Listener<Events[K]>> } = {};

  /** Call `listener` at each event; returns a function that stops it. */
  on<K extends keyof Events>(name: K, listener: Listener<Events[K]>): () => void {
    const set = (this.listeners[name] ??= new Set());
    set.add(listener);
    return () => set.delete(listener);
  }

  once<K extends keyof Events>(name: K, listener: Listener<Events[K]>): () => void {
    const off = this.on(name, (payload) => {
      off();
      listener(payload);
    });
    return off;
  }

  emit<K extends keyof Events>(name: K, payload: Events[K]): number {
    const set = this.listeners[name];
    if (!set) return 0;
    // A copy: a listener may remove itself while the others are being called.
    for (const listener of [...set]) {
      try {
        listener(payload);
      } catch (error) {
        console.error(`A listener of ${String(name)} failed`, error);
      }
    }
    return set.size;
  }
}

interface DownloadEvents extends Record<string, unknown> {
  progress: { received: number; total: number | null };
  done: { path: string; milliseconds: number };
  failed: Error;
}

export class Download extends Emitter<DownloadEvents> {
  constructor(private readonly url: string, private readonly path: string) {
    super();
  }

  async start(write: (chunk: Uint8Array) => Promise<void>): Promise<void> {
    const began = Date.now();
    try {
      const response = await fetch(this.url);
      if (!response.ok || !response.body) {
        throw new Error(`${response.status} ${response.statusText}`);
      }
      const length = response.headers.get("content-length");
      const total = length === null ? null : Number(length);
      let received = 0;
      const reader = response.body.getReader();
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        await write(value);
        received += value.byteLength;
        this.emit("progress", { received, total });
      }
      this.emit("done", { path: this.path, milliseconds: Date.now() - began });
    } catch (error) {
      this.emit("failed", error instanceof Error ? error : new Error(String(error)));
    }
  }
}
