/* The smallest program that uses an installed libep: the versions agree and a status has its name. */
#include <ep.h>

#include <stdio.h>
#include <string.h>

int main(void)
{
    if (ep_version() != EP_VERSION_NUMBER) {
        fprintf(stderr, "ep.h is %d, the library is %u\n", EP_VERSION_NUMBER, (unsigned)ep_version());
        return 1;
    }
    if (strcmp(ep_status_name(EP_ERR_TIMEOUT), "EP_ERR_TIMEOUT") != 0) {
        fprintf(stderr, "EP_ERR_TIMEOUT is named %s\n", ep_status_name(EP_ERR_TIMEOUT));
        return 1;
    }
    return 0;
}
