// consumer.c, from C++.
#include <ep.h>

#include <iostream>
#include <string>

int main() {
    if (ep_version() != EP_VERSION_NUMBER) {
        std::cerr << "ep.h is " << EP_VERSION_NUMBER << ", the library is " << ep_version() << '\n';
        return 1;
    }
    const std::string name = ep_status_name(EP_ERR_TIMEOUT);
    if (name != "EP_ERR_TIMEOUT") {
        std::cerr << "EP_ERR_TIMEOUT is named " << name << '\n';
        return 1;
    }
    return 0;
}
