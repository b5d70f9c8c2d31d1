/* Part of gate.c: the memory of the process. */

#ifdef __linux__
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

enum { READS_RESIDENT = 1 };

/* The open file; -1 for none. Threads without the GIL open it, too. */
static int statm = -1;

/* In a child of fork() the file would tell of the parent. */
static void
forget_statm(void)
{
    __atomic_store_n(&statm, -1, __ATOMIC_RELEASE);
}

static int
open_statm(void)
{
    int known = __atomic_load_n(&statm, __ATOMIC_ACQUIRE);
    if (known >= 0) {
        return known;
    }
    int file = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
    if (file < 0
        || __atomic_compare_exchange_n(&statm, &known, file, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
        return file;
    }
    /* Another thread was faster. */
    close(file);
    return known;
}

/* amanda.inline.resident_bytes(); needs no GIL. */
static long long
read_resident(void)
{
    char text[128];
    int file = open_statm();
    ssize_t count = file < 0 ? -1 : pread(file, text, sizeof text - 1, 0);
    text[count > 0 ? count : 0] = '\0';
    const char *pages = strchr(text, ' ');
    if (pages == NULL) {
        /* No such file, or a daemon closed all files of its process. */
        __atomic_compare_exchange_n(&statm, &file, -1, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
        return 0;
    }
    return strtoll(pages, NULL, 10) * sysconf(_SC_PAGESIZE);
}

static int
prepare_resident(void)
{
    return pthread_atfork(NULL, NULL, forget_statm);
}
#else
enum { READS_RESIDENT = 0 };

/* Python reads it. */
static long long
read_resident(void)
{
    return 0;
}

static int
prepare_resident(void)
{
    return 0;
}
#endif
