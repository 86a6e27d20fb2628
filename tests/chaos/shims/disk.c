/* A disk that a test can fill, preloaded into a process: nothing more can be written to files under one folder.
 *
 * Which folder, or none, and how many writes were refused, is in the file $TEST_DISK_STATE, which all processes map.
 * Room that a file has already is refused too, as on a disk that copies on write or under a quota that shrank. */
#define _GNU_SOURCE
#define _LARGEFILE64_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

struct state {
    long num_refused;
    char full[4088]; /* a path that ends with a slash; empty for a disk with room */
};

static struct state none;
static struct state *state = &none;

__attribute__((constructor)) static void map_state(void) {
    const char *path = getenv("TEST_DISK_STATE");
    int file = path == NULL ? -1 : open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof(struct state), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) state = mapped;
    close(file);
}

static int is_refused(int file) {
    if (*(volatile char *)state->full == '\0') return 0;
    int before = errno;
    char link[32], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = before;
    if (length < 0) return 0;
    path[length] = '\0';
    if (strncmp(path, state->full, strlen(state->full)) != 0) return 0;
    __atomic_add_fetch(&state->num_refused, 1, __ATOMIC_RELAXED);
    errno = ENOSPC;
    return 1;
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (real == NULL) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

#define WRITER(type, name, file, parameters, arguments) \
    type name parameters { \
        REAL(name); \
        return is_refused(file) ? (type)-1 : real arguments; \
    }

#define ALLOCATOR(name, parameters, arguments) \
    int name parameters { \
        REAL(name); \
        return is_refused(file) ? ENOSPC : real arguments; \
    }

WRITER(ssize_t, write, file, (int file, const void *data, size_t size), (file, data, size))
WRITER(ssize_t, pwrite, file, (int file, const void *data, size_t size, off_t at), (file, data, size, at))
WRITER(ssize_t, pwrite64, file, (int file, const void *data, size_t size, off64_t at), (file, data, size, at))
WRITER(ssize_t, writev, file, (int file, const struct iovec *parts, int num), (file, parts, num))
WRITER(ssize_t, pwritev, file, (int file, const struct iovec *parts, int num, off_t at), (file, parts, num, at))
WRITER(ssize_t, pwritev64, file, (int file, const struct iovec *parts, int num, off64_t at), (file, parts, num, at))
WRITER(ssize_t, pwritev2, file, (int file, const struct iovec *parts, int num, off_t at, int flags),
       (file, parts, num, at, flags))
WRITER(ssize_t, pwritev64v2, file, (int file, const struct iovec *parts, int num, off64_t at, int flags),
       (file, parts, num, at, flags))
WRITER(ssize_t, sendfile, file, (int file, int from, off_t *at, size_t size), (file, from, at, size))
WRITER(ssize_t, sendfile64, file, (int file, int from, off64_t *at, size_t size), (file, from, at, size))
ALLOCATOR(posix_fallocate, (int file, off_t at, off_t size), (file, at, size))
ALLOCATOR(posix_fallocate64, (int file, off64_t at, off64_t size), (file, at, size))

size_t fwrite(const void *data, size_t size, size_t num, FILE *stream) {
    REAL(fwrite);
    return is_refused(fileno(stream)) ? 0 : real(data, size, num, stream);
}
