/* Runs one kernel for tests: memory and arguments come from a file, memory goes to another. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

extern void kernel_entry(int64_t, int64_t, int64_t *);

static void take(void *to, size_t size, FILE *file) {
    if (size && fread(to, size, 1, file) != 1) exit(3);
}

int main(int count, char **names) {
    FILE *given = count == 3 ? fopen(names[1], "rb") : 0;
    if (!given) return 2;
    int64_t head[3]; /* regions, words, threads */
    take(head, sizeof head, given);
    int64_t *sizes = calloc(head[0] + 1, 8), *region = calloc(head[1] + 1, 8);
    int64_t *words = calloc(head[1] + 1, 8);
    char **memory = calloc(head[0] + 1, sizeof(char *));
    take(sizes, 8 * head[0], given);
    take(region, 8 * head[1], given);
    take(words, 8 * head[1], given);
    for (int64_t k = 0; k < head[0]; k++) {
        memory[k] = aligned_alloc(4096, (sizes[k] + 4095) / 4096 * 4096);
        take(memory[k], sizes[k], given);
    }
    for (int64_t k = 0; k < head[1]; k++)
        if (region[k] >= 0) words[k] += (int64_t)memory[region[k]];
    for (int64_t tid = 0; tid < head[2]; tid++) kernel_entry(tid, head[2], words);
    FILE *made = fopen(names[2], "wb");
    if (!made) return 2;
    for (int64_t k = 0; k < head[0]; k++)
        if (sizes[k] && fwrite(memory[k], sizes[k], 1, made) != 1) return 3;
    return fclose(made);
}
