// The page: a chat, and the machine that answers it.

import { startChat } from "./chat.js";
import { startExperts } from "./experts.js";
import { live } from "./live.js";
import { startMachine } from "./machine.js";
import { startSettings } from "./settings.js";

startSettings();
startChat();
startMachine();
startExperts();
live.start();
