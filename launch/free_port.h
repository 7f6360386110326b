#ifndef LAUNCH_FREE_PORT_H_
#define LAUNCH_FREE_PORT_H_

// TCP ports of this machine, for the store through which ranks meet.

#include <cstdint>

namespace tessera::launch {

// A port nobody listens on at this moment, chosen by the kernel.
//
// Nothing reserves it: between this call and rank 0's bind, another program may take it. Then rank
// 0 fails to listen and says so, and the run ends. The window is the start of a process, and the
// kernel hands out ports of a range of ~28,000, so a retry by the user is enough.
//
// Errors: ConfigError when the machine has no port left or no network.
int64_t pick_free_port();

// Whether a store could listen on `port` on every address of this machine.
//
// Requires: 1 <= port <= 65535.
// Errors:   ConfigError for a port that this user may not listen on, and without any network.
bool port_is_free(int64_t port);

}  // namespace tessera::launch

#endif  // LAUNCH_FREE_PORT_H_
