// Verifies webhooks with the official library: node verify.mjs FOLDER, where npm has installed standardwebhooks into FOLDER.
// Reads [{"headers": {…}, "body": base64, "key": "whsec_…"}, …] and prints a list of whether each is accepted.
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';

const { Webhook, WebhookVerificationError } = createRequire(`${process.argv[2]}/`)('standardwebhooks');

function accepts({ headers, body, key }) {
    try {
        new Webhook(key).verify(Buffer.from(body, 'base64'), headers);
        return true;
    } catch (error) {
        if (error instanceof WebhookVerificationError) return false;
        throw error;
    }
}

console.log(JSON.stringify(JSON.parse(readFileSync(0, 'utf8')).map(accepts)));
