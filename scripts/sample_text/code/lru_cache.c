/* A cache of fixed size that forgets the entry used longest ago.
 *
 * Entries hang in a hash table with chains, and in a doubly linked list from
 * the most to the least recently used. Both operations take constant time.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BUCKETS 64

typedef struct entry {
    char *key;
    long value;
    struct entry *newer, *older; /* in the order of use */
    struct entry *next;          /* in the bucket */
} entry;

typedef struct {
    entry *buckets[BUCKETS];
    entry *newest, *oldest;
    size_t count, capacity;
    unsigned long hits, misses;
} lru_cache;

static unsigned hash(const char *key)
{
    unsigned h = 2166136261u;
    for (; *key; key++) {
        h ^= (unsigned char)*key;
        h *= 16777619u;
    }
    return h % BUCKETS;
}

lru_cache *lru_new(size_t capacity)
{
    lru_cache *cache = calloc(1, sizeof *cache);
    if (cache)
        cache->capacity = capacity;
    return cache;
}

static void unlink_entry(lru_cache *cache, entry *e)
{
    if (e->newer)
        e->newer->older = e->older;
    else
        cache->newest = e->older;
    if (e->older)
        e->older->newer = e->newer;
    else
        cache->oldest = e->newer;
    e->newer = e->older = NULL;
}

static void push_front(lru_cache *cache, entry *e)
{
    e->older = cache->newest;
    e->newer = NULL;
    if (cache->newest)
        cache->newest->newer = e;
    cache->newest = e;
    if (!cache->oldest)
        cache->oldest = e;
}

static entry *find(lru_cache *cache, const char *key)
{
    for (entry *e = cache->buckets[hash(key)]; e; e = e->next)
        if (strcmp(e->key, key) == 0)
            return e;
    return NULL;
}

int lru_get(lru_cache *cache, const char *key, long *value)
{
    entry *e = find(cache, key);
    if (!e) {
        cache->misses++;
        return 0;
    }
    cache->hits++;
    *value = e->value;
    unlink_entry(cache, e);
    push_front(cache, e);
    return 1;
}

static void evict(lru_cache *cache)
{
    entry *victim = cache->oldest;
    entry **link = &cache->buckets[hash(victim->key)];
    while (*link != victim)
        link = &(*link)->next;
    *link = victim->next;
    unlink_entry(cache, victim);
    free(victim->key);
    free(victim);
    cache->count--;
}

int lru_put(lru_cache *cache, const char *key, long value)
{
    entry *e = find(cache, key);
    if (e) {
        e->value = value;
        unlink_entry(cache, e);
        push_front(cache, e);
        return 0;
    }
    if (cache->count == cache->capacity)
        evict(cache);
    e = calloc(1, sizeof *e);
    if (!e || !(e->key = strdup(key))) {
        free(e);
        return -1;
    }
    e->value = value;
    unsigned b = hash(key);
    e->next = cache->buckets[b];
    cache->buckets[b] = e;
    push_front(cache, e);
    cache->count++;
    return 0;
}

void lru_free(lru_cache *cache)
{
    while (cache->count)
        evict(cache);
    free(cache);
}

int main(void)
{
    lru_cache *cache = lru_new(3);
    const char *words[] = {"oak", "elm", "ash", "oak", "fir", "elm"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        long seen = 0;
        if (!lru_get(cache, words[i], &seen))
            seen = 0;
        lru_put(cache, words[i], seen + 1);
        printf("%-4s seen %ld time(s)\n", words[i], seen + 1);
    }
    printf("hits %lu, misses %lu\n", cache->hits, cache->misses);
    lru_free(cache);
    return 0;
}
