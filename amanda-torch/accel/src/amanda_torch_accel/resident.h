/* Part of gate.c: the memory of the process. */

#ifdef __linux__
#include <fcntl.h>
#include <unistd.h>

enum { READS_RESIDENT = 1 };

/* The open file, and in the upper half the process that has opened it: in a child of fork() it would tell
   of the parent. One number, as threads without the GIL open it; 0 for none. */
static uint64_t statm;

static int
open_statm(uint64_t *known)
{
    uint64_t process = (uint64_t)(uint32_t)getpid() << 32;
    *known = __atomic_load_n(&statm, __ATOMIC_ACQUIRE);
    while ((*known & ~(uint64_t)UINT32_MAX) != process) {
        int file = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
        if (file < 0) {
            return -1;
        }
        uint64_t opened = process | (uint32_t)file;
        if (__atomic_compare_exchange_n(&statm, known, opened, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
            *known = opened;
        }
        else {
            close(file);
        }
    }
    return (int)(uint32_t)*known;
}

/* amanda.inline.resident_bytes(); needs no GIL. */
static long long
read_resident(void)
{
    uint64_t known;
    char text[128];
    int file = open_statm(&known);
    ssize_t count = file < 0 ? -1 : pread(file, text, sizeof text - 1, 0);
    text[count > 0 ? count : 0] = '\0';
    const char *pages = strchr(text, ' ');
    if (pages == NULL) {
        /* No such file, or a daemon closed all files of its process. */
        if (file >= 0) {
            __atomic_compare_exchange_n(&statm, &known, 0, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
        }
        return 0;
    }
    return strtoll(pages, NULL, 10) * sysconf(_SC_PAGESIZE);
}
#else
enum { READS_RESIDENT = 0 };

/* Python reads it. */
static long long
read_resident(void)
{
    return 0;
}
#endif
