// Screwdriver's own executor for Kubernetes, without its worker: node screwdriver_executor.js FOLDER, where npm has installed
// screwdriver-executor-k8s into FOLDER. Each line of the input is
// {"do": "start" | "verify" | "stop", "buildConfig": {…}, "options": {…}}, with the options of the executor's constructor;
// the answer is a line {"result": …} or {"error": "…"}.
'use strict';

const readline = require('readline');

// The executor logs to standard output, which is for answers.
console._stdout = process.stderr;
const Executor = require(require.resolve('screwdriver-executor-k8s', { paths: [process.argv[2]] }));

async function run() {
    for await (const line of readline.createInterface({ input: process.stdin })) {
        const request = JSON.parse(line);
        const executor = new Executor(request.options);

        // Its scheme cannot be configured, and the stand-in speaks plain HTTP.
        executor.podsUrl = executor.podsUrl.replace(/^https:/, 'http:');
        const answer = await executor[request.do](request.buildConfig).then(
            result => ({ result }),
            error => ({ error: error.message })
        );

        process.stdout.write(`${JSON.stringify(answer)}\n`);
    }
}

// What the executor keeps open must not keep it alive.
run().then(() => process.exit(0));
