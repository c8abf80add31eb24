/* wordcount: count lines, words and bytes of files, as wc does. */
#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

struct counts {
    unsigned long lines, words, bytes;
};

static int count(FILE *file, struct counts *c)
{
    int ch, inside = 0;
    while ((ch = getc(file)) != EOF) {
        c->bytes++;
        if (ch == '\n')
            c->lines++;
        if (isspace(ch)) {
            inside = 0;
        } else if (!inside) {
            inside = 1;
            c->words++;
        }
    }
    return ferror(file) ? -1 : 0;
}

static void print(const struct counts *c, const char *name)
{
    printf("%8lu %8lu %8lu %s\n", c->lines, c->words, c->bytes, name);
}

int main(int argc, char **argv)
{
    struct counts total = {0};
    int status = 0;

    if (argc == 1) {
        count(stdin, &total);
        print(&total, "");
        return 0;
    }
    for (int i = 1; i < argc; i++) {
        FILE *file = fopen(argv[i], "rb");
        if (!file) {
            fprintf(stderr, "wordcount: %s: %s\n", argv[i], strerror(errno));
            status = 1;
            continue;
        }
        struct counts c = {0};
        if (count(file, &c) < 0) {
            fprintf(stderr, "wordcount: %s: read error\n", argv[i]);
            status = 1;
        }
        fclose(file);
        print(&c, argv[i]);
        total.lines += c.lines;
        total.words += c.words;
        total.bytes += c.bytes;
    }
    if (argc > 2)
        print(&total, "total");
    return status;
}
