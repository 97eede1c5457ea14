/* Prints the samples of a segment with one ragged uint16 column: written from docs/layout.md alone. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

static void fail(const char *why) { fprintf(stderr, "not a segment: %s\n", why); exit(1); }

/* MessagePack, as much as a description needs. */
static const uint8_t *at, *end;

static const uint8_t *take(uint64_t n) {
    const uint8_t *p = at;
    if (n > (uint64_t)(end - at)) fail("description too short");
    at += n;
    return p;
}
static uint64_t big_endian(int n) {
    uint64_t value = 0;
    for (const uint8_t *p = take(n); n > 0; n--) value = value << 8 | *p++;
    return value;
}
/* The length of a container or string, or the value of an unsigned integer. */
static uint64_t number(uint8_t tag) {
    if (tag <= 0x7f) return tag;
    if (tag <= 0x9f) return tag & 0x0f;
    if (tag <= 0xbf) return tag & 0x1f;
    switch (tag) {
        case 0xcc: case 0xd9: return big_endian(1);
        case 0xcd: case 0xda: case 0xdc: case 0xde: return big_endian(2);
        case 0xce: case 0xdb: case 0xdd: case 0xdf: return big_endian(4);
        case 0xcf: return big_endian(8);
    }
    fail("unexpected type");
    return 0;
}
static int is_map(uint8_t tag) { return (tag & 0xf0) == 0x80 || tag == 0xde || tag == 0xdf; }
static int is_array(uint8_t tag) { return (tag & 0xf0) == 0x90 || tag == 0xdc || tag == 0xdd; }
static int is_string(uint8_t tag) { return (tag & 0xe0) == 0xa0 || (tag >= 0xd9 && tag <= 0xdb); }

static void skip(void) {
    uint8_t tag = *take(1);
    if (tag == 0xc0 || tag == 0xc2 || tag == 0xc3) return;
    uint64_t n = number(tag);
    if (is_string(tag)) take(n);
    else if (is_array(tag)) while (n--) skip();
    else if (is_map(tag)) for (n *= 2; n--;) skip();
}
/* Moves to the value of `key` in the map that starts at `map`. */
static void find(const uint8_t *map, const char *key) {
    at = map;
    uint8_t tag = *take(1);
    if (!is_map(tag)) fail("no map");
    for (uint64_t n = number(tag); n--; skip()) {
        uint8_t key_tag = *take(1);
        if (!is_string(key_tag)) fail("a key is no string");
        uint64_t length = number(key_tag);
        const uint8_t *text = take(length);
        if (length == strlen(key) && !memcmp(text, key, length)) return;
    }
    fail(key);
}
struct array { char dtype[16]; uint64_t length, offset; };

static struct array array(const uint8_t *column, const char *name) {
    struct array found = {0};
    find(column, name);
    const uint8_t *map = at;
    find(map, "dtype");
    uint64_t length = number(*take(1));
    if (length >= sizeof found.dtype) fail("dtype");
    memcpy(found.dtype, take(length), length);
    find(map, "shape");
    if (number(*take(1)) != 1) fail("shape");
    found.length = number(*take(1));
    find(map, "offset");
    found.offset = number(*take(1));
    return found;
}

static uint64_t u64(const uint8_t *p) { uint64_t v; memcpy(&v, p, 8); return v; }
static uint32_t u32(const uint8_t *p) { uint32_t v; memcpy(&v, p, 4); return v; }

static uint32_t crc32(const uint8_t *p, uint64_t n) {
    uint32_t crc = ~0u;
    while (n--) {
        crc ^= *p++;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
    }
    return ~crc;
}

int main(int argc, char **argv) {
    int fd = argc == 2 ? open(argv[1], O_RDONLY | O_NOFOLLOW) : -1;
    struct stat status;
    if (fd < 0 || fstat(fd, &status) || !S_ISREG(status.st_mode) || status.st_size < 128) fail("no such file");
    const uint8_t *file = mmap(NULL, status.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (file == MAP_FAILED) fail("cannot be mapped");

    uint64_t total = u64(file + 32), description = u64(file + 64), data = u64(file + 72);
    if (memcmp(file, "SHMSERVE", 8) || u32(file + 8) != 3 || u32(file + 12) != 84) fail("header");
    if (total != (uint64_t)status.st_size || u64(file + 48) || u64(file + 56) != 128) fail("sizes");
    if (data % (2 << 20) || description > data - 128 || description > total - 128) fail("data offset");
    if (crc32(file + 128, description) != u32(file + 80)) fail("checksum");

    const uint8_t *root = file + 128;
    end = root + description;
    find(root, "num_samples");
    uint64_t samples = number(*take(1));
    find(root, "columns");
    if (number(*take(1)) != 1) fail("columns");
    const uint8_t *column = at;
    struct array values = array(column, "values"), offsets = array(column, "offsets");
    if (strcmp(values.dtype, "uint16") || strcmp(offsets.dtype, "int64")) fail("dtype");
    if (values.offset % 64 || values.offset < data || values.offset + values.length * 2 > total) fail("values");
    if (offsets.offset % 64 || offsets.offset + offsets.length * 8 > total || offsets.length != samples + 1)
        fail("offsets");

    printf("%s %llu samples\n", values.dtype, (unsigned long long)samples);
    for (uint64_t i = 0; i < samples; i++) {
        uint64_t start = u64(file + offsets.offset + 8 * i), stop = u64(file + offsets.offset + 8 * i + 8);
        if (start > stop || stop > values.length) fail("an offset");
        for (uint64_t item = start; item < stop; item++) {
            uint16_t value;
            memcpy(&value, file + values.offset + 2 * item, 2);
            printf("%s%u", item == start ? "" : " ", value);
        }
        printf("\n");
    }
    return 0;
}
