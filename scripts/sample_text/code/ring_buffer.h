#ifndef RING_BUFFER_H
#define RING_BUFFER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 * A queue between one producer and one consumer without locks.
 *
 * The size must be a power of two, so that an index is found by masking. Head
 * and tail only ever grow; their difference is the number of bytes waiting.
 */
struct ring_buffer {
    uint8_t *data;
    size_t mask;
    _Atomic size_t head; /* written by the producer */
    _Atomic size_t tail; /* written by the consumer */
};

static inline bool ring_init(struct ring_buffer *ring, uint8_t *memory, size_t size)
{
    if (size == 0 || (size & (size - 1)) != 0)
        return false;
    ring->data = memory;
    ring->mask = size - 1;
    atomic_init(&ring->head, 0);
    atomic_init(&ring->tail, 0);
    return true;
}

static inline size_t ring_used(const struct ring_buffer *ring)
{
    size_t head = atomic_load_explicit(&ring->head, memory_order_acquire);
    size_t tail = atomic_load_explicit(&ring->tail, memory_order_acquire);
    return head - tail;
}

static inline size_t ring_write(struct ring_buffer *ring, const uint8_t *bytes, size_t n)
{
    size_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    size_t tail = atomic_load_explicit(&ring->tail, memory_order_acquire);
    size_t space = ring->mask + 1 - (head - tail);
    if (n > space)
        n = space;
    for (size_t i = 0; i < n; i++)
        ring->data[(head + i) & ring->mask] = bytes[i];
    atomic_store_explicit(&ring->head, head + n, memory_order_release);
    return n;
}

static inline size_t ring_read(struct ring_buffer *ring, uint8_t *bytes, size_t n)
{
    size_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    size_t head = atomic_load_explicit(&ring->head, memory_order_acquire);
    if (n > head - tail)
        n = head - tail;
    for (size_t i = 0; i < n; i++)
        bytes[i] = ring->data[(tail + i) & ring->mask];
    atomic_store_explicit(&ring->tail, tail + n, memory_order_release);
    return n;
}

#endif
